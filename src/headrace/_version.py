"""The one place that says which version this is: the package, the command line and the build read
it.
"""

from __future__ import annotations

__version__ = "0.1.0"
