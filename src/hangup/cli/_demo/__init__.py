"""``hangup demo``: the same application on a real server, bare and with the middleware, and clients that hang up."""
