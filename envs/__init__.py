"""What the world does: environments of tools, text in and text out. Importing this registers the built-in ones."""

from envs.messages import call_text as call_text
from envs.registry import EnvRecord, register_env
from envs.tool_env import ToolEnv as ToolEnv
from envs.tools import ToolError as ToolError
from envs.tools import tool as tool

__all__ = ["EnvRecord", "ToolEnv", "ToolError", "call_text", "register_env", "tool"]

register_env(
    EnvRecord(
        id="cairn/Ledger-v0",
        entry_point="envs.ledger.env:LedgerEnv",
        package="cairn-rl",
        licence="Apache-2.0",
        description="A bank's back office: look up, verify, transfer, refund, freeze and note, 2 to 20 calls.",
        # A reset without a seed draws from the training seeds.
        splits={
            "train": range(0, 2**31),
            "validation": range(2**31, 2**31 + 1_000_000),
            "test": range(2**31 + 1_000_000, 2**31 + 2_000_000),
        },
        has_oracle=True,
    )
)
