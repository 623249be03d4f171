"""The models need an extra of their own; where it is not installed their file cannot even be imported."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("transformers") else ["transformers_models.py"]
