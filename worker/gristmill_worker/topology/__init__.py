"""Which CPUs and memory this process may use, how workers divide them, how a worker keeps to its share."""
