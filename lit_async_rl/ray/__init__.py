"""Ray: several engines as actors, on one machine or on a cluster. Nothing imports `ray` before a Ray class is used.

Ray pickles what its processes exchange: whoever reaches its ports runs code. What this package sends through it is
plain data (numbers, text, arrays), and answers are validated like those of any engine.
"""
