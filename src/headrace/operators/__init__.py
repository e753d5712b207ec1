"""What is computed: the specifications that a plan holds and the kernels that carry them out. Knows
neither Spark nor the log.
"""
