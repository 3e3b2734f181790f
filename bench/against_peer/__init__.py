"""kvferry beside other servers on one machine: `bench/against_peer.sh` runs it, here is what is not shell.

plan.py      what is measured in what order: sessions of one server each, in turn
search.py    the rate at which 90 % of requests attain their targets
servers.py   starts, warms and stops one server
clients.py   runs `python -m bench`, and the peer's own load generator as a witness
figures.py   from measured cells to the rows of the issue's table
plots.py     the trade-off curve, and goodput over the rate
openvino_in_process.py, gguf_f16.py    the peer that is no server, in a venv of its own
"""
