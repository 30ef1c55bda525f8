"""What a process remembers of checkpoints by their paths, although another one may lie there by now."""

import sys

REMEMBERED = (
    ("vllm.tokenizers.registry", "cached_get_tokenizer"),
    ("vllm.tokenizers.registry", "cached_resolve_tokenizer_args"),
    ("vllm.transformers_utils.config", "checkpoint_has_lm_head"),
    ("vllm.transformers_utils.config", "get_pooling_config"),
    ("vllm.transformers_utils.config", "get_sentence_transformer_tokenizer_config"),
    ("vllm.transformers_utils.config", "try_get_dense_modules"),
    ("vllm.transformers_utils.processor", "_cached_get_video_processor_cls_name"),
    ("vllm.transformers_utils.processor", "cached_get_feature_extractor"),
    ("vllm.transformers_utils.processor", "cached_get_image_processor"),
    ("vllm.transformers_utils.processor", "cached_get_processor"),
    ("vllm.transformers_utils.processor", "cached_get_video_processor"),
    ("vllm.transformers_utils.repo_utils", "_snapshot_non_weight_files"),
    ("vllm.transformers_utils.repo_utils", "list_repo_files"),
)
"""Functions of modules that remember their answers; a version without one of them skips it."""


def forget() -> None:
    """Read configurations, tokenizers and processors anew; who has one keeps it."""
    for module, name in REMEMBERED:
        function = getattr(sys.modules.get(module), name, None)
        if function is not None:
            function.cache_clear()
    templates = getattr(sys.modules.get("vllm.renderers.hf"), "_PROCESSOR_CHAT_TEMPLATES", None)
    if templates is not None:
        templates.clear()
