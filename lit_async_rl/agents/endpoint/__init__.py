"""OpenAI-compatible HTTP endpoint on the loopback interface, through which agents of any kind reach the policy."""
