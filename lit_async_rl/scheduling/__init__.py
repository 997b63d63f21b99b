"""When a prompt may be sampled and when its group may be trained on: the staleness bound. No threads, no clocks."""
