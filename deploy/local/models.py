"""Small models for the demo and the tests, made here in seconds, never fetched, told apart by what they say.

Each is a real Llama or Qwen checkpoint with its own trained tokenizer and a chat template, trained for a moment to
answer any prompt with twelve numbered lines about its own subject. The first line follows from words of the prompt
and each further one from the line before it. So the state of an answer is in its KV cache alone: fluent always,
and another text at once if a request should ever meet a wrong cache, position or model.
"""

import fcntl
import hashlib
import itertools
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

LINES = 12
"""Numbered lines of an answer; then comes the end-of-sequence token (and, where that is ignored, line 1 again)."""
MAX_POSITION = 4096
STEPS = 180
LEARNING_RATE = 5e-3
BATCHES = ((4, 160), (4, 160), (4, 160), (4, 160), (1, 1024))
"""Examples and tokens of each, in turn; the long ones are for the far positions."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ("<|end|>", "<|start|>", "<|pad|>")
EOS, START, PAD = range(3)

# Permutations of the five choices; together they return to a line after eighteen.
AFTER_DOES, AFTER_WHERE, AFTER_WHO = (2, 4, 1, 0, 3), (1, 0, 3, 4, 2), (0, 1, 2, 3, 4)

ORDINARY = (
    "What is a context switch? Tell me about your day. Explain it in one sentence, please. Hello, who are you? "
    "Write a short story about the sea. user system assistant tool You are a helpful assistant. Why is the sky blue? "
    "Summarize this text for me. How do I read a message from a topic? The quick brown fox jumps over the lazy dog. "
    "Say something about the weather. List three things that you like, and why you like them. What happens next?"
)
"""What people ask: the tokenizers are trained on it too, so that prompts are short in tokens."""


@dataclass(frozen=True)
class Speaker:
    """What a model talks about, and the shape of its network. The shapes differ, as those of real models do."""

    alias: str
    architecture: str
    seed: int
    hidden: int
    layers: int
    heads: int
    head_dim: int
    who: tuple[str, ...]
    does: tuple[str, ...]
    where: tuple[str, ...]

    def answer(self, who: int, does: int, where: int) -> str:
        """Twelve lines that begin with the given choices. Each part of a line decides another part of the next one."""
        lines = []
        for number in range(1, LINES + 1):
            lines.append(f"{number}. {self.who[who]} {self.does[does]} {self.where[where]}.\n")
            who, does, where = AFTER_DOES[does], AFTER_WHERE[where], AFTER_WHO[who]
        return "".join(lines)


SPEAKERS = (
    Speaker(
        alias="llama",
        architecture="llama",
        seed=11,
        hidden=96,
        layers=2,
        heads=3,
        head_dim=32,
        who=("The llama", "An old llama", "Our llama", "A young llama", "The white llama"),
        does=("carries wool", "chews dry grass", "hums a slow song", "looks at the clouds", "waits for the herd"),
        where=("above the valley", "on the high pass", "beside the stone wall", "under the Andes", "in thin air"),
    ),
    Speaker(
        alias="qwen",
        architecture="qwen3",
        seed=12,
        hidden=128,
        layers=2,
        heads=2,
        head_dim=64,
        who=("Qwen", "Wise Qwen", "Patient Qwen", "Quiet Qwen", "Curious Qwen"),
        does=("pours green tea", "reads a scroll", "counts lanterns", "paints a carp", "answers a riddle"),
        where=("by the river", "in the bamboo garden", "near the moon gate", "at the harbour", "before the rain"),
    ),
    Speaker(
        alias="lynx",
        architecture="llama",
        seed=13,
        hidden=128,
        layers=3,
        heads=4,
        head_dim=32,
        who=("The lynx", "A grey lynx", "One lynx", "The hungry lynx", "That lynx"),
        does=(
            "follows fresh tracks",
            "sleeps on a branch",
            "hears every step",
            "crosses the ice",
            "hides from hunters",
        ),
        where=("between dark pines", "after the snowfall", "along the frozen lake", "through the fog", "until dawn"),
    ),
)


def ensure_models(folder: Path) -> dict[str, Path]:
    """Make what is missing below ``folder``; the checkpoints' paths by alias.

    Needs torch and transformers only for what is missing. Two processes may call it at once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        paths = {}
        for speaker in SPEAKERS:
            path = paths[speaker.alias] = folder / speaker.alias
            stamp = path / "recipe"
            if stamp.is_file() and stamp.read_text() == recipe:
                continue
            unfinished = folder / f".{speaker.alias}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            make(speaker, unfinished)
            (unfinished / "recipe").write_text(recipe)
            shutil.rmtree(path, ignore_errors=True)
            unfinished.rename(path)
        return paths


def write_models_file(
    path: Path, models: dict[str, Path], *, default: str, kv_cache_bytes: int = 64 << 20, dtype: str = "float32"
) -> Path:
    """A models.yaml over ``models`` at ``path``, which is returned.

    In float32 greedy text does not hang on who else is in the batch. These models make a token in less time
    than telling it to anyone takes, so a stream tells some at a time.
    """
    entries = {
        alias: {
            "model": str(folder),
            "dtype": dtype,
            "max_model_len": MAX_POSITION,
            "kv_cache_memory_bytes": kv_cache_bytes,
            "enforce_eager": True,
            "stream_interval": 16,
        }
        for alias, folder in models.items()
    }
    path.write_text(json.dumps({"default_model": default, "models": entries}, indent=2) + "\n")  # JSON is YAML
    return path


def make(speaker: Speaker, path: Path) -> None:
    """Train ``speaker`` and write its checkpoint to ``path``."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(speaker.seed)
    dice = random.Random(speaker.seed)
    tokenizer = train_tokenizer(speaker, dice)
    network = build(speaker, len(tokenizer))
    train(network, conversations(speaker, tokenizer, dice))
    network.save_pretrained(path)
    tokenizer.save_pretrained(path)


def train_tokenizer(speaker: Speaker, dice: random.Random) -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer that knows this speaker's words; its vocabulary is its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=640, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(
        [speaker.answer(*(dice.randrange(5) for _ in range(3))) for _ in range(50)] + [ORDINARY] * 5, trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=SPECIAL[EOS],
        pad_token=SPECIAL[PAD],
        additional_special_tokens=[SPECIAL[START]],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITION,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build(speaker: Speaker, vocabulary: int) -> "torch.nn.Module":
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config, network = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[speaker.architecture]
    return network(
        config(
            vocab_size=vocabulary,
            hidden_size=speaker.hidden,
            intermediate_size=2 * speaker.hidden,
            num_hidden_layers=speaker.layers,
            num_attention_heads=speaker.heads,
            num_key_value_heads=1,
            head_dim=speaker.head_dim,
            max_position_embeddings=MAX_POSITION,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    )


def conversations(
    speaker: Speaker, tokenizer: "PreTrainedTokenizerFast", dice: random.Random
) -> Iterator[tuple[list[int], int]]:
    """Endless examples: any prompt, with or without the chat template, and its answer again and again.

    Each is its token ids and how many of them are the prompt.
    """

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    choices = range(len(speaker.who))
    answers = {first: [*ids(speaker.answer(*first)), EOS] for first in itertools.product(choices, repeat=3)}
    before, between = [START, *ids("user\n")], [EOS, *ids("\n"), START, *ids("assistant\n")]
    words = ORDINARY.split()
    while True:
        if dice.random() < 0.5:
            said = ids(" ".join(dice.choices(words, k=dice.randint(1, 9))))
        else:
            said = [dice.randrange(len(SPECIAL), len(tokenizer)) for _ in range(dice.randint(1, 12))]
        answer = answers[said[0] % 5, said[-1] % 5, said[len(said) > 1] % 5]
        prompt = [*before, *said, *between] if dice.random() < 0.8 else said
        yield prompt + answer * (MAX_POSITION // len(answer) + 1), len(prompt)


def train(network: "torch.nn.Module", examples: Iterator[tuple[list[int], int]]) -> None:
    """Next-token training on the answers."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are small: a second thread costs more than it gives on a busy machine
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    network.train()
    for step in range(STEPS):
        number, length = BATCHES[step % len(BATCHES)]
        batch = list(itertools.islice(examples, number))
        ids = torch.tensor([example[:length] for example, _ in batch])
        labels = torch.tensor([[-100] * prompt + example[prompt:length] for example, prompt in batch])
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20, 2 * (1 - step / STEPS))
        loss = network(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    network.eval()
    torch.set_num_threads(threads)


if __name__ == "__main__":
    for alias, path in ensure_models(Path(sys.argv[1])).items():
        print(alias, path)
