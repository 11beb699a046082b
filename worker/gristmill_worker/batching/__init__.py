"""From requests to batches: linger (when), shapes and costs (what there is), planner (what goes where)."""
