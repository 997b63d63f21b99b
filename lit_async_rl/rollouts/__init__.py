"""The background side: admits prompts, collects and scores completions, filters groups, hands out finished ones."""
