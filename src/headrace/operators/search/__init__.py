"""Search on streams: stored queries meet passing documents. Query language, analysis, the index of
queries, and the kernel.
"""
