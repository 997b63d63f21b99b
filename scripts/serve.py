"""Starts a vLLM server for a trainer: `python scripts/serve.py --model Qwen/Qwen2.5-0.5B-Instruct --port 8000`."""

from lit_async_rl.engines.vllm.serve import main

if __name__ == "__main__":
    main()
