"""The one place that says which version this is: the package, the command line and the build read it."""

__version__ = "0.1.0"
