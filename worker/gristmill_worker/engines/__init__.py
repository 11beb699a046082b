"""Engines behind one protocol. An engine's library is imported only when that engine is loaded."""
