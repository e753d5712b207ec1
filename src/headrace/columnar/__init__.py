"""Arrow and numpy primitives that know nothing of streams: sorting, segments of equal keys, key and
row codecs, look-ups, and the reserved column names.
"""
