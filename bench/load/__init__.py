"""`kvferry bench`: a load generator for any OpenAI-compatible URL, and what it measures at the client.

    settings ─▶ plan (arrivals × lengths × traces) ─▶ runner ─▶ client, connection ─▶ the service
                                                        │          └─ answer_stream: bytes to times of text
                                                        ▼
                        records ─▶ statistics, goodput, summary ─▶ table, result_file, plots, rates

What decides (plan, reading a stream, statistics) is pure and made from a seed; `connection`, `client`, `runner`,
`server_facts` hold the sockets and the clock.
"""
