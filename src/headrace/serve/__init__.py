"""Views over HTTP: read, queried, and pushed as they change. `start` runs a server in a thread
beside whatever else the process does.

Read in this order: `server` (sockets and threads), `access` (who may ask), `app` (what can be
asked), `views` and `query` (answers), `channels` (one reader for many subscribers), `changes` and
`tail` (what they hear), `stores` (which version of a view is served).
"""
