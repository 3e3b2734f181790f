"""The version of kvferry. Pure.

Read as text by the build (`pyproject.toml`), so that the number stands in one place.
"""

VERSION = "0.1.0"
