"""Headwater: distributed serving of large language models.

Importing this package is cheap on purpose: it pulls in neither an engine nor the HTTP server.
"""

__version__ = "0.1.0"
