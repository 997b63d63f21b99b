"""vLLM servers reached over HTTP: a fleet that may lose and regain members."""
