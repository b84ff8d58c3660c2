"""An engine without a model, and tests in virtual time: for your agents, tools and rewards.

Names are imported on first use: an engine process that simulates needs neither pytest nor
transformers.
"""

from rollout.lazy import export_stub

export_stub(globals())
