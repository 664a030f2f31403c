"""A tiny model in both formats, and a small hub of our own on the loopback address."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

COMMIT = "0123456789abcdef0123456789abcdef01234567"

TOKENS = ["<unk>", "<s>", "</s>"] + [f"t{i}" for i in range(61)]


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with grouped heads, biases on attention and tied embeddings off, saved by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5, rope_theta=50000.0,
        tie_word_embeddings=False, attention_bias=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder


def _permuted(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The order in which llama.cpp's converter stores query and key rows, spelt out row by row."""
    out = np.empty_like(weight)
    size = len(weight) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + i + size // 2]
    return out


_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face parameter."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[rest]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


@pytest.fixture(scope="session")
def write_gguf(llama_folder: Path) -> Callable[..., Path]:
    """``write(path, change, quantise, leave_out)``: the llama of ``llama_folder`` as a GGUF file.

    ``change(writer)`` may add metadata and tensors, ``quantise`` is the type of the large matrices.
    """
    from safetensors.numpy import load_file

    weights = load_file(llama_folder / "model.safetensors")

    def write(
        path: Path,
        change: Callable[[Any], None] | None = None,
        quantise: gguf.GGMLQuantizationType | None = None,
        leave_out: tuple[str, ...] = (),
    ) -> Path:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(2)
        writer.add_context_length(128)
        writer.add_embedding_length(32)
        writer.add_feed_forward_length(64)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(50000.0)
        writer.add_rope_dimension_count(8)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3, 3] + [1] * 61)
        writer.add_token_merges(["t 1", "t 2"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template("{{ messages }}")
        if change:
            change(writer)
        for name, weight in weights.items():
            if name in leave_out:
                continue
            heads = 4 if ".q_proj." in name else 2 if ".k_proj." in name else 0
            stored = _permuted(weight, heads) if heads else weight
            if quantise is not None and stored.ndim == 2:
                writer.add_tensor(gguf_name(name), gguf.quants.quantize(stored, quantise), raw_dtype=quantise)
            else:
                writer.add_tensor(gguf_name(name), stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


class Hub:
    """A hub: ``repos`` maps ``owner/name`` to its files; ``gated`` names those whose files are refused.

    It answers what the hub client asks: a model's revision, its tree, and files, of which large ones are
    reached through a redirect as on the real hub. ``log`` lists ``METHOD path`` of every request.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: list[str] = []
        self.log: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # The same server under another name: the client treats it as the store that the real hub redirects to.
        self.store = f"http://localhost:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, with_body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        self.log.append(f"{request.command} {path}")
        status, headers, body = self._reply(path)
        span = request.headers.get("Range")
        if span and status == 200:
            first, _, last = span.removeprefix("bytes=").partition("-")
            whole, body = len(body), body[int(first) : int(last) + 1 if last else None]
            status, headers = 206, headers | {"Content-Range": f"bytes {first}-{int(first) + len(body) - 1}/{whole}"}
        request.send_response(status)
        for key, value in headers.items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if with_body:
            request.wfile.write(body)

    def _reply(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = path.strip("/").split("/")
        if parts[0] == "large":
            return 200, {}, self.repos["/".join(parts[1:3])]["/".join(parts[3:])]
        api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if api else parts[:2])
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        files = self.repos[repo]
        if api and parts[4:5] == ["tree"]:
            tree = [{"type": "file", "path": k, "size": len(data), "oid": _oid(data)} for k, data in files.items()]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        if api:
            if parts[4:] and parts[5] not in ("main", COMMIT):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            about = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            return 200, {"Content-Type": "application/json"}, json.dumps(about).encode()
        return self._file(repo, "/".join(parts[4:]))

    def _file(self, repo: str, name: str) -> tuple[int, dict[str, str], bytes]:
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        data = self.repos[repo].get(name)
        if data is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_oid(data)}"'}
        if name.endswith((".safetensors", ".gguf")):
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
            return 302, headers | {"Location": f"{self.store}/large/{repo}/{name}"}, b""
        return 200, headers, data


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()
