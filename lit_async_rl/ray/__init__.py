"""Ray: several engines as actors, and trainer ranks, on one machine or on a cluster.

Nothing imports `ray` before it is needed.

Ray pickles what its processes exchange: whoever reaches its ports runs code. What this package sends through it is
plain data (numbers, text, arrays), and answers are validated like those of any engine.
"""
