"""nnScaler policies: how the operators of a traced model are spread over the GPUs of a plan.

    parallelize(model, sample, context_parallel, compute_config)       from Python
    pas_policy: mtraining_nns.policy.context_parallel                  in nnScaler's YAML

`context_parallel` cuts every operator along the tokens, over all GPUs of the plan, and replicates the weights. The
tokens are those of the graph's attention operators (`nnscaler_ops.attention`); inputs of the model with as many columns
are cut, and each operator follows the operators that it reads. One that cannot follow is an error that names its source
line, since nnScaler would gather activations for it.

pas_config.recompute: true makes every layer with an attention operator one recomputation group: the module under the
deepest numbered name, as in model.layers.7.
"""

from nnscaler.graph.function.dimops import IRDimops
from nnscaler.ir import IRSubTensor
from nnscaler.policies import OpPartition, OpPlan, get_pas_ops

ATTENTION = "mtraining_nns.nnscaler_ops.attention"


def context_parallel(graph, cfg):
    """Yield an OpPlan for every operator of the graph; RuntimeError for one that cannot be cut along the tokens."""
    nodes = get_pas_ops(graph)
    length = _length(nodes)
    cut = {}  # full tensor -> its dim of tokens
    groups = _Groups(nodes) if cfg.pas_config.get("recompute", False) else None
    for node in nodes:
        group = -1 if groups is None else groups.of(node)
        if not isinstance(node, IRDimops):
            if any(x.parent in cut for x in _tensors(node.inputs())):
                raise RuntimeError(
                    f"nnScaler does not know how {node.signature} can be cut along the tokens; write it with others,"
                    f" such as view or reshape, or register it with nnscaler.register_op; from {node.comment}"
                )
            # it takes the model's inputs apart; what has the tokens as columns comes whole, its readers cut it
            cut.update({x.parent: 1 for x in _tensors(node.outputs()) if len(x.shape) == 2 and x.shape[1] == length})
            yield OpPlan(node, recompute_id=group)
            continue
        cut.update({x.parent: 1 for x in _tensors(node.inputs()) if _is_input(graph, x, length)})
        yield OpPlan(node, partition=_follow(node, cut, cfg.plan_ngpus), recompute_id=group)


def _follow(node, cut: dict, ngpus: int) -> OpPartition | None:
    """How an operator is cut, given how its inputs are; notes in `cut` how its outputs then are."""
    wanted = {i: cut[x.parent] for i, x in enumerate(node.inputs()) if isinstance(x, IRSubTensor) and x.parent in cut}
    if not wanted or ngpus == 1:
        return None
    index, dim = next(iter(wanted.items()))
    parts = node.algorithm("dim").instantiate(idx=index, dim=dim, num=ngpus)
    if not parts:
        raise RuntimeError(
            f"{node.signature} cannot be cut along the tokens (input {index}, dim {dim}) over {ngpus} GPUs, its"
            f" annotation is {node.anno}; call an operator that can, or register one; from {node.comment}"
        )
    for i, x in enumerate(node.inputs()):
        if isinstance(x, IRSubTensor) and i not in wanted and parts[0].input(i).splitdims():
            raise RuntimeError(
                f"{node.signature} would cut its input {i} along the tokens, which comes whole: in the ring's order its"
                " rows are other tokens; make it of samples['position_ids'], not of torch.arange or a table as long as"
                f" the sequence; from {node.comment}"
            )
    found = {i: parts[0].input(i).splitdims() for i in wanted}
    if any(list(found[i]) != [dim] for i, dim in wanted.items()):
        raise RuntimeError(
            f"{node.signature} would cut its inputs along {found}, their tokens lie along {wanted}; from {node.comment}"
        )
    for whole, part in zip(node.outputs(), parts[0].outputs()):
        if isinstance(part, IRSubTensor) and part.splitdims():
            cut[whole.parent] = part.splitdims()[0]
    return OpPartition(input=index, dim=dim)


def _length(nodes) -> int:
    """Tokens of the graph's attention operators."""
    lengths = {node.inputs()[0].shape[1] for node in nodes if node.signature == ATTENTION}
    if len(lengths) != 1:
        raise RuntimeError(
            f"the policy needs a model that calls nnscaler_ops.attention on sequences of one length, got lengths"
            f" {sorted(lengths) or 'none'}; attach the operator with mtraining_nns.nnscaler_hf.attach or call it"
        )
    return lengths.pop()


def _is_input(graph, x, length: int) -> bool:
    """A tensor that nothing in the graph makes and that has the tokens as columns."""
    return not x.parent.is_param() and not graph.producers(x.parent) and len(x.shape) == 2 and x.shape[1] == length


def _tensors(values) -> list:
    return [x for x in values if isinstance(x, IRSubTensor)]


class _Groups:
    """A number for every layer that holds an attention operator, in the order of the graph."""

    def __init__(self, nodes):
        layers = [_layer_of(node.fqn) for node in nodes if node.signature == ATTENTION]
        self.numbers = {layer: number for number, layer in enumerate(dict.fromkeys(filter(None, layers)))}

    def of(self, node) -> int:
        """The group of an operator, -1 outside all layers."""
        words = node.fqn.split(".")
        prefixes = (".".join(words[:length]) for length in range(len(words), 0, -1))
        return next((self.numbers[prefix] for prefix in prefixes if prefix in self.numbers), -1)


def _layer_of(fqn: str) -> str | None:
    """model.layers.7 of model.layers.7.self_attn, None without a number."""
    words = fqn.split(".")
    numbered = [i for i, word in enumerate(words) if word.isdecimal()]
    return ".".join(words[: numbered[-1] + 1]) if numbered else None
