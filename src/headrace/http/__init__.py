"""What the server of views (`headrace.serve`) and the HTTP gateway (`headrace.gateways`) share.

In the order in which a request passes:

    server      the server's thread and port
    connections what a connection may cost before its request is complete
    proxies     reverse proxies: forwarded addresses, public URLs
    access      who may send requests
    responses   JSON, and errors as HTTP statuses
    prometheus  metrics as text
"""
