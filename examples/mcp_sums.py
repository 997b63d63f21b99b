"""Trains with the tool of an MCP server: the policy adds numbers, and may call `add`.

    pip install "lit-async-rl[mcp]"
    python examples/mcp_sums.py

The server is this file, too: `python examples/mcp_sums.py serve`.
"""

from __future__ import annotations

import sys

import lit_async_rl as rl


def serve() -> None:
    """Runs the server, on stdin and stdout."""
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("sums")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    server.run("stdio")


def main(max_steps: int = 2) -> dict[str, float]:
    """Trains; returns the last metrics."""
    agent = rl.McpAgent([sys.executable, __file__, "serve"], max_turns=3)
    trainer = rl.fit(
        rl.asset("calculator_policy"),
        rl.Addition(num_digits=3, size=1000),
        recipe=None,
        engine=rl.AgentEngine(
            rl.EmbeddedEngine(),
            agent,
            parser=rl.CalculatorParser(),
            chat_template="calculator_chat.jinja",
        ),
        sampling={"max_tokens": 12},
        max_steps=max_steps,
        max_staleness=2,
        groups_per_step=4,
        group_size=4,
        accelerator="cpu",
    )
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        print(main())
