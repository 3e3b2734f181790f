"""What stands between a socket and a route: TLS, CORS, keys, limits, bodies in and answers out."""
