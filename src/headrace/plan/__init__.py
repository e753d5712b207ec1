"""The inert plan of a pipeline: steps, names, fingerprints and expressions. Nothing here runs."""
