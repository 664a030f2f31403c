"""Loading and unloading adapters (LoRA) while the server runs, as clients of vLLM and of SGLang ask for it."""

from __future__ import annotations

from bough.base.errors import BoughError, EngineError, InvalidRequest, NotFound, Unavailable
from bough.base.messages import ControlOp
from bough.server.errors import encode_json
from bough.server.schema import LoadAdapterRequest, UnloadAdapterRequest
from bough.server.work import Call

ERRORS = {400: InvalidRequest, 404: NotFound, 503: Unavailable}


async def load(call: Call, body: LoadAdapterRequest) -> bytes:
    """Make an adapter known and load it; answers when it is ready. As in vLLM, with the message as a JSON string."""
    await _load(call, body)
    return encode_json(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload(call: Call, body: UnloadAdapterRequest) -> bytes:
    """Forget an adapter; requests that use it go on. As in vLLM, with the message as a JSON string."""
    await _control(call, "unload_adapter", name=body.lora_name)
    return encode_json(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def load_native(call: Call, body: LoadAdapterRequest) -> bytes:
    """The same with SGLang's answer."""
    await _load(call, body)
    return await _loaded(call)


async def unload_native(call: Call, body: UnloadAdapterRequest) -> bytes:
    """The same with SGLang's answer."""
    await _control(call, "unload_adapter", name=body.lora_name)
    return await _loaded(call)


async def _load(call: Call, body: LoadAdapterRequest) -> None:
    if body.lora_name == call.service.model_name:
        raise InvalidRequest("an adapter cannot have the name of the model", param="lora_name")
    path, pinned = body.lora_path or body.lora_name, "true" if body.pinned else "false"
    await _control(call, "load_adapter", name=body.lora_name, path=path, pinned=pinned)


async def _loaded(call: Call) -> bytes:
    names = await _control(call, "list_adapters")
    return encode_json({"success": True, "error_message": "", "loaded_adapters": names})


async def _control(call: Call, op: ControlOp, **args: str) -> dict[str, str]:
    """What the engine answers; its refusal as the error that it is."""
    reply = await call.engine.client.control(op, **args)
    if not reply.ok:
        kind: type[BoughError] = ERRORS.get(int(reply.info.get("status") or 500), EngineError)
        raise kind(reply.message)
    return {name: str(value) for name, value in reply.info.items()}
