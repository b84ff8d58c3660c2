"""Makes verl run on one thread and say nothing; imported before it."""

from __future__ import annotations

import logging
import os
import warnings

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["VERL_LOGGING_LEVEL"] = "ERROR"
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
