"""The embedded log: a directory, no server, safe for several processes at once.

Read in this order: `disk` (the file layer), `frame` and `segment` (how rows lie on disk), `journal`
and `state` (what is true), `committer` (how something becomes true), `recovery`, then `log`, which
puts the API on top.
"""
