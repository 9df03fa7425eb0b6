"""Run a HuggingFace model over a text with the operator: what each layer kept, and how sparse its gradient is.

    recording = record(Request(model="models/smollm2", text="book.txt", seq_len=8192))

One forward and one backward pass on one device, layers recomputed in the backward pass, weights without gradients: so
memory holds the model, the inputs of its layers and one layer's activations. Only local models: a folder with
safetensors, or a GGUF file (needs the package gguf). No code from the folder is run.
"""

from dataclasses import asdict, dataclass, field

import torch

from mtraining_nns import hf
from mtraining_nns.errors import UserError
from mtraining_nns.eval.huggingface import TextTokenizer
from mtraining_nns.eval.text import TextSource, read_source
from mtraining_nns.loss import IGNORE
from mtraining_nns.model import CausalLMLoss, check_layers, recompute_layers
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.ring import Ring
from mtraining_nns.pretrained import Pretrained
from mtraining_nns.recording import Recording
from mtraining_nns.rope import rope_of, with_rope
from mtraining_nns.sparsity import MASS, Sparsity, Tap, sampled_rows
from mtraining_nns.tables import align

BYTES_PER_TOKEN = 16  # text read for a token; tokenizers make 3 to 5 bytes of text a token


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to run. seq_len: None for as much of the text as the model was trained to read at once.

    rope_theta: replaces the model's own, to go past its trained length. rows: queries measured in each layer.
    """

    model: str
    text: str
    seq_len: int | None = None
    rope_theta: float | None = None
    rows: int = 32
    device: str = "cpu"
    attention: AttentionConfig = field(default_factory=AttentionConfig)

    def __post_init__(self):
        if self.seq_len is not None and self.seq_len < 4:
            raise UserError(f"--seq-len must be at least 4, got {self.seq_len}")
        if self.rows < 1:
            raise UserError(f"--rows must be at least 1, got {self.rows}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda needs a GPU, there is none here; use --device cpu")


def record(request: Request) -> Recording:
    """Indices of all layers on the text. UserError for a model, a text or a length that cannot be used."""
    source = Pretrained.at(request.model)
    config, seq_len = _config(source, request)
    check_layers(request.attention, config)
    ids, text = _tokens(source, request, seq_len)
    lm = _load(source, config).to(request.device)
    tap = Tap(_operator(request), sampled_rows(len(ids), request.rows))
    loss = _run(lm, tap, ids.to(request.device))
    last = {layer: index.to("cpu") for layer, (index, _) in sorted(tap.operator.last.items())}
    about = {
        "model": request.model,
        "text": text.describe(),
        "loss": loss,
        "rope": rope_of(config),
        "attention": asdict(tap.operator.config),
        "rows": tap.rows,
        "mass": MASS,
        "budgets": [budgets for _, budgets in sorted(tap.budgets.items())],
        "layers": [
            {"layer": layer, "density": index.density(len(ids)).item(), **tap.found[layer]._asdict()}
            for layer, index in last.items()
        ],
    }
    return Recording(indices=last, seq_len=len(ids), about=about)


def sparsity_table(recording: Recording) -> str:
    """A row a layer: density of the index, sparsity of the weights and of dL/dS."""
    rows = [["layer", "density", f"keys for {100 * MASS:g} % of |A|", "of |dL/dS|", "|dL/dS| on A's keys"]]
    for found in recording.about["layers"]:
        shares = (found[name] for name in ("density", *Sparsity._fields))
        rows.append([str(found["layer"]), *(f"{share:.4f}" for share in shares)])
    return align(rows)


def _config(source: Pretrained, request: Request):
    """(transformers config with the rope of the request, tokens to read)."""
    config = source.config()
    limit = config.max_position_embeddings
    seq_len = request.seq_len or limit
    if request.rope_theta is None:
        if seq_len > limit:
            raise UserError(
                f"--seq-len {seq_len} is past the {limit} tokens that {request.model} was trained to;"
                " shorten it or raise --rope-theta"
            )
        return config, seq_len
    rope = rope_of(config) | {"rope_theta": request.rope_theta}
    return with_rope(config, rope, base_length=limit, trained_length=max(seq_len, limit)), seq_len


def _tokens(source: Pretrained, request: Request, seq_len: int) -> tuple[torch.Tensor, TextSource]:
    """(int64 [S], where from): the beginning of the text, opened as the model's tokenizer opens texts."""
    tokenizer = TextTokenizer(source.tokenizer())
    text = read_source(request.text, max_bytes=BYTES_PER_TOKEN * seq_len)
    opening = [] if tokenizer.first is None else [tokenizer.first]
    ids = torch.cat([torch.tensor(opening, dtype=torch.long), tokenizer.stream(text.documents)])[:seq_len]
    if len(ids) < (request.seq_len or 4):
        raise UserError(
            f"{request.text} has {len(ids)} tokens, expected {request.seq_len or 4};"
            " give a longer text or a smaller --seq-len"
        )
    return ids, text


def _load(source: Pretrained, config):
    hf.register()
    lm = source.causal_lm(config, dtype=torch.float32, attn_implementation=hf.NAME)
    hf.rope_check(lm)
    return lm


def _operator(request: Request) -> Operator:
    try:
        return Operator(request.attention, Ring.single(), request.device)
    except ValueError as error:
        raise UserError(str(error)) from error


def _run(lm, tap: Tap, ids: torch.Tensor) -> float:
    """Forward and backward over ids [S]; returns the mean loss of the tokens."""
    try:
        hf.attach(lm, tap)
    except ValueError as error:
        raise UserError(f"the model cannot use the operator: {error}") from error
    lm.requires_grad_(False)
    lm.enable_input_require_grads()  # so that gradients run through all layers, though no weight wants one
    recompute_layers(lm.train())
    labels = torch.cat([ids[1:], ids.new_tensor([IGNORE])])
    loss = CausalLMLoss(lm)(ids[None], labels[None], torch.arange(len(ids), device=ids.device)[None])
    if not loss.isfinite():
        raise UserError(f"the model's loss on the text is {loss.item()}; its weights are broken, take a whole model")
    loss.backward()
    return loss.item() / (len(ids) - 1)
