"""Type prompts at a trained policy: `python scripts/chat.py --model runs/my_policy [--prompt "31424210="]`."""

import sys

from lit_async_rl.cli.console import main

if __name__ == "__main__":
    main(["chat", *sys.argv[1:]])
