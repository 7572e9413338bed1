"""Rank processes and tests share this folder's modules."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
