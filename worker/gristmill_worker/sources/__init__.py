"""Where requests come from and results go to."""
