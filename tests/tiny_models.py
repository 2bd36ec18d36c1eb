"""Write tiny models with random weights that a real llama-server loads in a tenth of a second.

    python tests/tiny_models.py FOLDER [KIND ...]

Their text is noise; all else that a supervisor meets is real: architecture, tokenizer, chat
template, KV cache, recurrent state, sliding window, pooling. Kinds: `llama` (dense attention),
`gemma3` (sliding window of 64), `qwen35`, `lfm2`, `jamba` (hybrid), `mamba` (recurrent), `bert`
(embeddings), `rerank`, and `garbage`: `llama` again, but it may speak bytes that are not UTF-8.

The weights are seeded, so a kind is the same file everywhere. All but `garbage` can only speak
printable ASCII: every other token has an output row of zeros, which greedy decoding never picks,
so a reply ends where `n_predict` says.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

__all__ = ["KINDS", "fingerprint", "write", "write_all"]

CONTEXT_TOKENS = 8192
WIDTH = 64
HEADS = 4
FEED_FORWARD = 192
SPECIAL = ("<|start|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
# Whole words, so that a token is longer than a letter as in a real vocabulary.
WORDS = re.findall(
    r"\w+",
    "a and answer are assistant be book color count day do first for four give green has have he "
    "hello her how I in is it jump know language like list make me model name not number of on "
    "one or question red request say second sentence server she short so story system tell test "
    "text that the then there they this three to token two use user was we what where who why "
    "with word work world write yes you your",
)


def printable(byte: int) -> str:
    """Return the character by which byte-level vocabularies spell a byte (GPT-2's table)."""
    if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
        return chr(byte)
    unprintable = [b for b in range(0xAE) if not (0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC)]
    return chr(0x100 + unprintable.index(byte))


class Draft:
    """A model being written: its writer, its vocabulary and its random numbers."""

    def __init__(self, path: Path, kind: str, architecture: str, seed: int) -> None:
        self.writer = gguf.GGUFWriter(str(path), architecture)
        self.random = np.random.default_rng(seed)
        self.vocabulary: list[str] = []
        self.silent: list[int] = []
        self.writer.add_name(f"tiny {kind}, random weights")
        self.writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        self.writer.add_embedding_length(WIDTH)
        self.writer.add_layer_norm_rms_eps(1e-5)

    def shape(
        self,
        layers: int,
        feed_forward: int = FEED_FORWARD,
        heads: int = HEADS,
        context: int = CONTEXT_TOKENS,
    ) -> None:
        self.writer.add_context_length(context)
        self.writer.add_block_count(layers)
        self.writer.add_feed_forward_length(feed_forward)
        self.writer.add_head_count(heads)

    # Weights. Shapes are numpy's: outputs first, inputs last.

    def weight(self, name: str, outputs: int, inputs: int, scale: float = 1.0) -> None:
        values = self.random.standard_normal((outputs, inputs)) * scale / np.sqrt(inputs)
        self.tensor(name, values)

    def tensor(self, name: str, values: np.ndarray) -> None:
        self.writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))

    def ones(self, *names: str, size: int = WIDTH) -> None:
        for name in names:
            self.tensor(name, np.ones(size))

    def zeros(self, *names: str, size: int = WIDTH) -> None:
        for name in names:
            self.tensor(name, np.zeros(size))

    def embedding_and_output(self, norm: str = "output_norm.weight") -> None:
        size = len(self.vocabulary)
        self.tensor("token_embd.weight", self.random.standard_normal((size, WIDTH)))
        self.ones(norm)
        output = self.random.standard_normal((size, WIDTH)) * 3 / np.sqrt(WIDTH)
        output[self.silent] = 0.0
        self.tensor("output.weight", output)

    def feed_forward(self, block: str) -> None:
        self.ones(f"{block}.ffn_norm.weight")
        self.feed_forward_weights(block)

    def feed_forward_weights(self, block: str) -> None:
        self.weight(f"{block}.ffn_gate.weight", FEED_FORWARD, WIDTH)
        self.weight(f"{block}.ffn_up.weight", FEED_FORWARD, WIDTH)
        self.weight(f"{block}.ffn_down.weight", WIDTH, FEED_FORWARD)

    def attention(
        self, block: str, kv_heads: int, head: int = WIDTH // HEADS, *, gated: bool = False
    ) -> None:
        self.weight(f"{block}.attn_q.weight", HEADS * head * (2 if gated else 1), WIDTH)
        self.weight(f"{block}.attn_k.weight", kv_heads * head, WIDTH)
        self.weight(f"{block}.attn_v.weight", kv_heads * head, WIDTH)
        self.weight(f"{block}.attn_output.weight", WIDTH, HEADS * head)

    def head_norms(self, block: str, head: int = WIDTH // HEADS) -> None:
        self.ones(f"{block}.attn_q_norm.weight", f"{block}.attn_k_norm.weight", size=head)

    # Tokenizers.

    def byte_pairs(self, pre: str, *, bos: bool = True, any_byte: bool = False) -> None:
        """Give the model a byte-level BPE vocabulary of whole words, and a chat template."""
        newline, space = printable(0x0A), printable(0x20)
        pieces = [newline * 2, *WORDS, *(space + word for word in WORDS)]
        tokens = [printable(byte) for byte in range(256)]
        merges: list[str] = []
        for piece in pieces:
            # A word is merged letter by letter from its front, so its beginnings are tokens too.
            for end in range(2, len(piece) + 1):
                if piece[:end] not in tokens:
                    tokens.append(piece[:end])
                    merges.append(f"{piece[: end - 1]} {piece[end - 1]}")
        first_special = len(tokens)
        tokens += SPECIAL
        spoken = [*range(0x20, 0x7F), *range(257, first_special)]
        self.vocabulary = tokens
        self.silent = sorted(set(range(len(tokens))) - set(spoken))
        if any_byte:
            self.silent = list(range(first_special, len(tokens)))
        kinds = [gguf.TokenType.NORMAL] * first_special + [gguf.TokenType.CONTROL] * len(SPECIAL)
        writer = self.writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(merges)
        writer.add_vocab_size(len(tokens))
        writer.add_bos_token_id(first_special)
        writer.add_eos_token_id(tokens.index("<|im_end|>"))
        writer.add_pad_token_id(tokens.index("<|pad|>"))
        writer.add_add_bos_token(bos)
        writer.add_chat_template(TEMPLATE)

    def word_pieces(self) -> None:
        """Give the model a WordPiece vocabulary of whole words and single characters."""
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        letters = [chr(c) for c in range(0x21, 0x7F) if chr(c) == chr(c).lower()]
        starts = dict.fromkeys([*(word.lower() for word in WORDS), *letters])
        tokens = [*special, *("\u2581" + start for start in starts), *letters]
        self.vocabulary = tokens
        kinds = [gguf.TokenType.CONTROL] * len(special)
        kinds += [gguf.TokenType.NORMAL] * (len(tokens) - len(special))
        writer = self.writer
        writer.add_tokenizer_model("bert")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_type_count(2)
        writer.add_vocab_size(len(tokens))
        for number, add in enumerate(
            (
                writer.add_pad_token_id,
                writer.add_unk_token_id,
                writer.add_bos_token_id,
                writer.add_sep_token_id,
                writer.add_mask_token_id,
            )
        ):
            add(number)
        writer.add_eos_token_id(special.index("[SEP]"))
        writer.add_add_bos_token(value=True)
        writer.add_add_eos_token(value=True)


def dense(draft: Draft, *, any_byte: bool = False) -> None:
    draft.shape(layers=2)
    draft.writer.add_head_count_kv(2)
    draft.writer.add_rope_dimension_count(WIDTH // HEADS)
    draft.writer.add_rope_freq_base(10_000.0)
    draft.byte_pairs("llama-bpe", any_byte=any_byte)
    draft.embedding_and_output()
    for layer in range(2):
        block = f"blk.{layer}"
        draft.ones(f"{block}.attn_norm.weight")
        draft.attention(block, kv_heads=2)
        draft.feed_forward(block)


def garbage(draft: Draft) -> None:
    dense(draft, any_byte=True)


def sliding_window(draft: Draft) -> None:
    layers = 6  # every sixth layer of gemma3 sees the whole context
    draft.shape(layers)
    draft.writer.add_head_count_kv(1)
    draft.writer.add_key_length(16)
    draft.writer.add_value_length(16)
    draft.writer.add_sliding_window(64)
    draft.writer.add_rope_freq_base(1_000_000.0)
    draft.byte_pairs("llama-bpe")
    draft.embedding_and_output()
    for layer in range(layers):
        block = f"blk.{layer}"
        draft.ones(f"{block}.attn_norm.weight", f"{block}.post_attention_norm.weight")
        draft.attention(block, kv_heads=1, head=16)
        draft.head_norms(block, head=16)
        draft.feed_forward(block)
        draft.ones(f"{block}.post_ffw_norm.weight")


def delta_net(draft: Draft) -> None:
    layers, interval, head = 4, 4, 32
    state, key_heads, value_heads = 128, 1, 2  # the GPU kernels want a state of 128
    keys, values = state * key_heads, state * value_heads
    draft.shape(layers)
    writer = draft.writer
    writer.add_head_count_kv(2)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(8)
    writer.add_rope_dimension_sections([2, 1, 1, 0])
    writer.add_rope_freq_base(10_000_000.0)
    writer.add_full_attention_interval(interval)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(key_heads)
    writer.add_ssm_time_step_rank(value_heads)
    writer.add_ssm_inner_size(values)
    draft.byte_pairs("qwen2", bos=False)
    draft.embedding_and_output()
    for layer in range(layers):
        block = f"blk.{layer}"
        draft.ones(f"{block}.attn_norm.weight", f"{block}.post_attention_norm.weight")
        if layer % interval == interval - 1:
            draft.attention(block, kv_heads=2, head=head, gated=True)
            draft.head_norms(block, head=head)
        else:
            draft.weight(f"{block}.attn_qkv.weight", 2 * keys + values, WIDTH)
            draft.weight(f"{block}.attn_gate.weight", values, WIDTH)
            draft.weight(f"{block}.ssm_conv1d.weight", 2 * keys + values, 4)
            draft.zeros(f"{block}.ssm_dt.bias", size=value_heads)
            draft.tensor(f"{block}.ssm_a", -np.ones(value_heads))
            draft.weight(f"{block}.ssm_beta.weight", value_heads, WIDTH)
            draft.weight(f"{block}.ssm_alpha.weight", value_heads, WIDTH)
            draft.ones(f"{block}.ssm_norm.weight", size=state)
            draft.weight(f"{block}.ssm_out.weight", WIDTH, values)
        draft.feed_forward_weights(block)


def short_convolution(draft: Draft) -> None:
    kv_heads = [0, 0, 2, 0]  # 0 marks a convolution layer
    draft.shape(len(kv_heads))
    draft.writer.add_head_count_kv(kv_heads)
    draft.writer.add_shortconv_l_cache(3)
    draft.writer.add_rope_freq_base(1_000_000.0)
    draft.byte_pairs("lfm2")
    draft.embedding_and_output(norm="token_embd_norm.weight")
    for layer, heads in enumerate(kv_heads):
        block = f"blk.{layer}"
        draft.ones(f"{block}.attn_norm.weight")
        if heads:
            draft.attention(block, kv_heads=heads)
            draft.head_norms(block)
        else:
            draft.weight(f"{block}.shortconv.conv.weight", WIDTH, 3)
            draft.weight(f"{block}.shortconv.in_proj.weight", 3 * WIDTH, WIDTH)
            draft.weight(f"{block}.shortconv.out_proj.weight", WIDTH, WIDTH)
        draft.feed_forward(block)


STATE, KERNEL, RANK, INNER = 16, 4, 8, 2 * WIDTH


def state_space_keys(draft: Draft) -> None:
    draft.writer.add_ssm_conv_kernel(KERNEL)
    draft.writer.add_ssm_inner_size(INNER)
    draft.writer.add_ssm_state_size(STATE)
    draft.writer.add_ssm_time_step_rank(RANK)


def state_space(draft: Draft, block: str) -> None:
    draft.weight(f"{block}.ssm_in.weight", 2 * INNER, WIDTH)
    draft.weight(f"{block}.ssm_conv1d.weight", INNER, KERNEL)
    draft.weight(f"{block}.ssm_x.weight", RANK + 2 * STATE, INNER)
    draft.weight(f"{block}.ssm_dt.weight", INNER, RANK)
    draft.weight(f"{block}.ssm_out.weight", WIDTH, INNER)
    draft.zeros(f"{block}.ssm_conv1d.bias", f"{block}.ssm_dt.bias", size=INNER)
    draft.ones(f"{block}.ssm_d", size=INNER)
    draft.tensor(f"{block}.ssm_a", -np.tile(np.arange(1.0, STATE + 1), (INNER, 1)))


def state_space_and_attention(draft: Draft) -> None:
    kv_heads = [0, 2, 0, 0]  # 0 marks a state-space layer
    draft.shape(len(kv_heads))
    draft.writer.add_head_count_kv(kv_heads)
    state_space_keys(draft)
    draft.byte_pairs("llama-bpe")
    draft.embedding_and_output()
    for layer, heads in enumerate(kv_heads):
        block = f"blk.{layer}"
        draft.ones(f"{block}.attn_norm.weight")
        if heads:
            draft.attention(block, kv_heads=heads)
        else:
            state_space(draft, block)
            draft.ones(f"{block}.ssm_dt_norm.weight", size=RANK)
            draft.ones(f"{block}.ssm_b_norm.weight", f"{block}.ssm_c_norm.weight", size=STATE)
        draft.feed_forward(block)


def state_space_only(draft: Draft) -> None:
    draft.shape(layers=2, feed_forward=0, heads=0)
    state_space_keys(draft)
    draft.byte_pairs("llama-bpe")
    draft.embedding_and_output()
    for layer in range(2):
        draft.ones(f"blk.{layer}.attn_norm.weight")
        state_space(draft, f"blk.{layer}")


def encoder(draft: Draft, *, ranks: bool = False) -> None:
    longest, layers, inner = 512, 2, 4 * WIDTH
    draft.shape(layers, feed_forward=inner, context=longest)
    draft.writer.add_layer_norm_eps(1e-12)
    draft.writer.add_causal_attention(value=False)
    draft.writer.add_pooling_type(gguf.PoolingType.RANK if ranks else gguf.PoolingType.MEAN)
    draft.word_pieces()
    size = len(draft.vocabulary)
    draft.tensor("token_embd.weight", draft.random.standard_normal((size, WIDTH)))
    draft.weight("token_types.weight", 2, WIDTH)
    draft.weight("position_embd.weight", longest, WIDTH)

    def norm(name: str) -> None:
        draft.ones(f"{name}.weight")
        draft.zeros(f"{name}.bias")

    def linear(name: str, outputs: int, inputs: int) -> None:
        draft.weight(f"{name}.weight", outputs, inputs)
        draft.zeros(f"{name}.bias", size=outputs)

    norm("token_embd_norm")
    for layer in range(layers):
        block = f"blk.{layer}"
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            linear(f"{block}.{part}", WIDTH, WIDTH)
        norm(f"{block}.attn_output_norm")
        linear(f"{block}.ffn_up", inner, WIDTH)
        linear(f"{block}.ffn_down", WIDTH, inner)
        norm(f"{block}.layer_output_norm")
    if ranks:
        linear("cls", WIDTH, WIDTH)
        linear("cls.output", 1, WIDTH)


def ranker(draft: Draft) -> None:
    encoder(draft, ranks=True)


# Kind -> (llama.cpp's architecture, what fills a draft).
KINDS = {
    "llama": ("llama", dense),
    "gemma3": ("gemma3", sliding_window),
    "qwen35": ("qwen35", delta_net),
    "lfm2": ("lfm2", short_convolution),
    "jamba": ("jamba", state_space_and_attention),
    "mamba": ("mamba", state_space_only),
    "bert": ("bert", encoder),
    "rerank": ("bert", ranker),
    "garbage": ("llama", garbage),
}


def write(kind: str, folder: Path) -> Path:
    """Write one model and return its path, `tiny-KIND.gguf`."""
    architecture, fill = KINDS[kind]
    path = folder / f"tiny-{kind}.gguf"
    draft = Draft(path, kind, architecture, seed=len(architecture))
    fill(draft)
    draft.writer.write_header_to_file()
    draft.writer.write_kv_data_to_file()
    draft.writer.write_tensors_to_file()
    draft.writer.close()
    return path


def fingerprint() -> str:
    """Return what tells one version of these models from another: this file's own text."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]


def write_all(folder: Path) -> Path:
    """Write every kind into a folder that appears whole; one that is already there is kept."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".tiny-", dir=folder.parent))
        for kind in KINDS:
            write(kind, draft)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for kind in sys.argv[2:] or KINDS:
        path = write(kind, folder)
        sys.stdout.write(f"{path}  {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
