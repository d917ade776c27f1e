"""A qwen35 GGUF with an MTP block, small enough to be made anew for each test session.

Weights are random but *peaked*: the residual stream is ruled by the last token's embedding, and the output head maps
each token to its successor in a fixed cycle of letters, with a margin far above rounding. So greedy output is known in
advance and equal between arms, and drafts are right except after the letters of ``WRONG_AFTER``, where the MTP block's
own head names another. Layers are not zero: attention and recurrent state take part in every logit.
"""

import math
from pathlib import Path

import gguf
import numpy as np

CYCLE = "abcdefghijklmnopqrstuvwxyz0123456789"
WRONG_AFTER = "dhlptx26"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_tokens() -> list[str]:
    """The 256 printable stand-ins of bytes that GPT-2's byte-level BPE uses, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def successor(text: str, n: int) -> str:
    """What the model says greedily after a text that ends in a letter of the cycle."""
    at = CYCLE.index(text[-1])
    return "".join(CYCLE[(at + 1 + i) % len(CYCLE)] for i in range(n))


def write(path: Path, *, layers: int = 4, hidden: int = 512, mtp: bool = True, seed: int = 0) -> Path:
    """Write the model; returns the path."""
    rng = np.random.default_rng(seed)
    head_dim, heads, kv_heads, inner = 64, 2, 1, 128
    k_heads, v_heads, linear_dim, conv = 1, 2, 32, 4
    tokens = byte_tokens() + SPECIAL
    vocab = len(tokens)

    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_name("peaked")
    writer.add_block_count(layers + mtp)
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(16)
    writer.add_rope_dimension_sections([3, 3, 2, 0])
    writer.add_rope_freq_base(1e7)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_ssm_conv_kernel(conv)
    writer.add_ssm_inner_size(linear_dim * v_heads)
    writer.add_ssm_state_size(linear_dim)
    writer.add_ssm_time_step_rank(v_heads)
    writer.add_ssm_group_count(k_heads)
    writer.add_uint32("qwen35.full_attention_interval", 4)
    if mtp:
        writer.add_uint32("qwen35.nextn_predict_layers", 1)

    kind = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([kind.NORMAL] * 256 + [kind.CONTROL] * len(SPECIAL))
    # The loader wants merges; this pair never occurs (NUL NUL), so that a token is always one byte.
    writer.add_token_merges([f"{tokens[0]} {tokens[0]}"])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT)

    def put(name: str, *shape: int, scale: float | None = None) -> None:
        scale = 1 / math.sqrt(shape[-1]) if scale is None else scale
        writer.add_tensor(name, (rng.standard_normal(shape) * scale).astype(np.float32))

    def ones(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, np.float32))

    def ffn(block: str) -> None:
        put(f"{block}.ffn_gate.weight", inner, hidden)
        put(f"{block}.ffn_up.weight", inner, hidden)
        put(f"{block}.ffn_down.weight", hidden, inner, scale=SMALL / math.sqrt(inner))

    def attention(block: str) -> None:
        put(f"{block}.attn_q.weight", heads * head_dim * 2, hidden)
        put(f"{block}.attn_k.weight", kv_heads * head_dim, hidden)
        put(f"{block}.attn_v.weight", kv_heads * head_dim, hidden)
        put(f"{block}.attn_output.weight", hidden, heads * head_dim, scale=SMALL / math.sqrt(heads * head_dim))
        ones(f"{block}.attn_q_norm.weight", head_dim)
        ones(f"{block}.attn_k_norm.weight", head_dim)

    def linear(block: str) -> None:
        values, keys = v_heads * linear_dim, k_heads * linear_dim
        put(f"{block}.attn_qkv.weight", 2 * keys + values, hidden)
        put(f"{block}.attn_gate.weight", values, hidden)
        put(f"{block}.ssm_conv1d.weight", 2 * keys + values, conv, scale=0.5)
        put(f"{block}.ssm_dt.bias", v_heads, scale=0.1)
        writer.add_tensor(f"{block}.ssm_a", -np.ones(v_heads, np.float32))
        put(f"{block}.ssm_beta.weight", v_heads, hidden)
        put(f"{block}.ssm_alpha.weight", v_heads, hidden)
        ones(f"{block}.ssm_norm.weight", linear_dim)
        put(f"{block}.ssm_out.weight", hidden, values, scale=SMALL / math.sqrt(values))

    SMALL = 0.02  # of a block's output against the embedding's unit scale

    embedding = rng.standard_normal((vocab, hidden)).astype(np.float32)
    successors = {ord(c): ord(CYCLE[(i + 1) % len(CYCLE)]) for i, c in enumerate(CYCLE)}
    others = [t for t in range(vocab) if t not in successors]
    # Each letter of the cycle is named by its predecessor; from any other token the cycle is entered.
    head = np.zeros((vocab, hidden), np.float32)
    for token, then in successors.items():
        head[then] += embedding[token]
    for number, token in enumerate(others):
        head[ord(CYCLE[number % len(CYCLE)])] += embedding[token]
    draft_head = head.copy()
    for letter in WRONG_AFTER:
        right = successors[ord(letter)]
        wrong = ord(CYCLE[(CYCLE.index(letter) + 5) % len(CYCLE)])
        draft_head[right] -= embedding[ord(letter)]
        draft_head[wrong] += 2 * embedding[ord(letter)]

    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output.weight", head / math.sqrt(hidden))
    ones("output_norm.weight", hidden)
    for i in range(layers):
        block = f"blk.{i}"
        ones(f"{block}.attn_norm.weight", hidden)
        ones(f"{block}.post_attention_norm.weight", hidden)
        (attention if i % 4 == 3 else linear)(block)
        ffn(block)
    if mtp:
        block = f"blk.{layers}"
        ones(f"{block}.attn_norm.weight", hidden)
        ones(f"{block}.post_attention_norm.weight", hidden)
        attention(block)
        ffn(block)
        # Of (embedding, hidden state) the block hears the embedding, and a little of the other.
        eye = np.concatenate([np.eye(hidden), 0.05 * np.eye(hidden)], axis=1).astype(np.float32)
        writer.add_tensor(f"{block}.nextn.eh_proj.weight", eye)
        for norm in ("enorm", "hnorm", "shared_head_norm"):
            ones(f"{block}.nextn.{norm}.weight", hidden)
        writer.add_tensor(f"{block}.nextn.shared_head_head.weight", draft_head / math.sqrt(hidden))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
