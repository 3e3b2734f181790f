"""How bytes get from one process to another: sockets, the KV transfer protocol, channels."""
