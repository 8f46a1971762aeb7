"""What torch's operations do to a dtype, by name."""

import re


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _names(
    """to reshape view flatten unflatten transpose permute squeeze unsqueeze expand expand_as narrow select t
    contiguous clone detach chunk split split_with_sizes tensor_split unbind movedim swapaxes swapdims cpu cuda T
    mT H mH real data as_strided unfold view_as reshape_as pin_memory diagonal broadcast_to requires_grad_
    expand_dims"""
)
# Operands meet in one dtype, or torch refuses.
SAME_DTYPE = _names(
    """matmul mm bmm mv addmm baddbmm addmv dot inner outer einsum tensordot linear bilinear conv1d conv2d conv3d
    embedding scaled_dot_product_attention multi_dot cross cdist cat concat stack vstack hstack dstack grouped_mm
    _grouped_mm index_add index_add_ scatter_add scatter_add_ scatter_reduce"""
)
PROMOTING = _names(
    """mul add sub div multiply subtract divide true_divide rsub addcmul addcdiv lerp where maximum minimum remainder
    fmod hypot pow"""
)
# The first operand's dtype, whatever else is given; results are new memory.
OF_FIRST = _names(
    """square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan tanh sigmoid silu gelu elu softplus
    leaky_relu mish hardswish softmax log_softmax softmin sum mean prod nansum nanmean std var norm cumsum cumprod
    logsumexp round floor ceil trunc mul_ add_ sub_ div_ reciprocal erf sign vector_norm sigmoid_ exp_ sqrt_
    rsqrt_ interpolate glu relu relu_ abs neg clamp clamp_ clamp_min clamp_max max min amax amin median kthvalue
    sort topk masked_fill masked_fill_ masked_select gather take take_along_dim index_select index_copy
    index_copy_ index_fill scatter scatter_ repeat repeat_interleave roll flip rot90 tile pad diag tril triu
    layer_norm rms_norm group_norm batch_norm normalize dropout fill_ zero_ copy_ unique"""
)
COMPUTES = SAME_DTYPE | PROMOTING | OF_FIRST
INDICES = _names(
    """argmax argmin argsort nonzero searchsorted bucketize bincount count_nonzero eq ne lt le gt ge isnan isinf
    isfinite any all logical_and logical_or logical_not bitwise_and long int short char byte bool numel size
    bitwise_or randint randperm one_hot"""
)
SECOND_IS_INDEX = _names("sort topk max min kthvalue median mode")
FLOAT_FACTORIES = _names("empty zeros ones rand randn empty_strided linspace logspace eye empty_permuted")
LIKE = _names(
    """empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_zeros new_ones new_full
    new_empty_strided"""
)
# A copy of their first argument, cast.
CONVERTING = _names("tensor as_tensor asarray new_tensor")
# Reductions with ``dtype=``: they cast as they read, or in a pass before.
FUSED_DTYPE = _names("sum mean nansum nanmean prod norm vector_norm matrix_norm")
PASSED_DTYPE = _names("softmax log_softmax softmin cumsum cumprod logcumsumexp")
CAST_METHODS = {"float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16"}
_QUANTISER = re.compile(
    r"^_?(\w+_)?quanti[sz]e(_\w+)?$|^_?(\w+_)?quant(_\w+)?$|^_?(\w+_)?cast_to_(fp|nvfp|mxfp)\d\w*$"
)
_BACK = re.compile(r"dequant|unquant|fake_quant")


def quantises(name: str) -> bool:
    """Whether a function's name says that it stores values in a narrow format and does nothing before.

    A name that begins with another operation (``rmsnorm_quantise``) is a fused one: what it reads it computes with.
    """
    last = name.rpartition(".")[2].lower()
    if _BACK.search(last) or not _QUANTISER.match(last):
        return False
    before = re.split(r"quant|cast_to", last.lstrip("_"))[0].strip("_").split("_")
    fmt = {
        "",
        "act",
        "dynamic",
        "static",
        "scaled",
        "per",
        "token",
        "block",
        "group",
        "channel",
        "tensor",
        "weight",
    }
    return all(word in fmt or re.fullmatch(r"(nv|mx)?(fp|int|e)\d\w*|kv|x|q|k|v", word) for word in before)
