"""The tokenizer and detokenizer processes: a loop over one inbox, which no message can end."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Final

import msgspec

from minisgl.core.errors import RequestError
from minisgl.core.message import (
    AbortMsg,
    BackendMsg,
    ConversionReply,
    DecodeMsg,
    DetokenizeMsg,
    DetokenizerStatsMsg,
    EncodeMsg,
    EngineView,
    Failure,
    FrontendMsg,
    LostMsg,
    TokenizeMsg,
    TokenizerMsg,
    UserMsg,
    UserReply,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.core.params import Limits
from minisgl.core.plan import FinishReason
from minisgl.process.processes import Ready
from minisgl.process.queues import Codec, ZmqPullQueue, ZmqPushQueue
from minisgl.tokenizer.detokenize import DetokenizeManager
from minisgl.tokenizer.template import ChatTemplate
from minisgl.tokenizer.tokenize import TokenizeManager

logger = logging.getLogger(__name__)

REPORT_S: Final = 0.25


def tokenize_worker(
    folder: Path,
    limits: Limits,
    template: ChatTemplate,
    inbox_addr: str,
    backend_addr: str,
    frontend_addr: str,
    ready: Ready,
) -> None:
    """Serve `inbox_addr` forever: send tokenized prompts to the scheduler, and text of tokens to the API server."""
    inbox: ZmqPullQueue[TokenizerMsg] = ZmqPullQueue(inbox_addr, Codec(TokenizerMsg))
    backend: ZmqPushQueue[BackendMsg] = ZmqPushQueue(backend_addr, Codec(BackendMsg))
    frontend: ZmqPushQueue[FrontendMsg] = ZmqPushQueue(frontend_addr, Codec(FrontendMsg))
    worker = Worker(TokenizeManager(folder, limits, template))
    ready({})
    while True:
        to_backend, to_frontend = worker.handle(inbox.get(timeout=REPORT_S))
        if to_backend:
            backend.put(to_backend)
        if to_frontend:
            frontend.put(to_frontend)


class Worker:
    """Handles batches of messages, without the sockets."""

    def __init__(self, tokenize: TokenizeManager) -> None:
        self._tokenize = tokenize
        self._detokenize = DetokenizeManager(tokenize.tokenizer)
        self._dropped = 0  # inconsistent messages
        self._reported, self._reported_at = (0, 0), 0.0

    @property
    def entries(self) -> int:
        """The number of requests with decoding state."""
        return self._detokenize.entries

    def handle(self, messages: list[TokenizerMsg]) -> tuple[list[BackendMsg], list[FrontendMsg]]:
        """Return the messages for the scheduler and those for the API server.

        Running streams go first, since they must not wait for a long prompt. Requests and aborts keep their order. An
        inconsistent message is dropped, counted and logged.
        """
        to_backend: list[BackendMsg] = []
        to_frontend: list[FrontendMsg] = []
        aborted = {msg.uid for msg in messages if isinstance(msg, AbortMsg)}
        for msg in sorted(messages, key=lambda m: not isinstance(m, DetokenizeMsg)):
            try:
                self._handle(msg, aborted, to_backend, to_frontend)
            except Exception:
                self._dropped += 1
                logger.exception("dropped a %s that contradicts itself", type(msg).__name__)
        self._report(not messages, to_frontend)
        return to_backend, to_frontend

    def _handle(
        self, msg: TokenizerMsg, aborted: set[int], to_backend: list[BackendMsg], to_frontend: list[FrontendMsg]
    ) -> None:
        match msg:
            case DetokenizeMsg():
                replies, stopped = self._detokenize.detokenize(msg)
                to_frontend += replies
                to_backend += [AbortMsg(uid) for uid in stopped]
            case TokenizeMsg(uid=uid) if uid in aborted:  # aborted in the same batch
                to_frontend.append(UserReply(uid=uid, finish_reason=FinishReason.ABORT))
                aborted.discard(uid)
            case TokenizeMsg():
                self._accept(msg, to_backend, to_frontend)
            case EncodeMsg() | DecodeMsg():
                to_frontend.append(self._convert(msg))
            case EngineView():
                to_frontend.append(self._with_texts(msg))
            case AbortMsg(uid) if uid in aborted:
                to_backend.append(msg)
            case LostMsg(incarnation):
                self._detokenize.ignore(incarnation)
                to_frontend.append(msg)

    def _report(self, is_idle: bool, to_frontend: list[FrontendMsg]) -> None:
        """Report changes of the counts to the API server, at most every `REPORT_S` while there is work."""
        now = time.monotonic()
        entries, dropped = self._reported
        counts = self.entries, self._dropped + self._detokenize.dropped
        if counts != self._reported and (is_idle or now - self._reported_at > REPORT_S):
            self._reported, self._reported_at = counts, now
            to_frontend.append(DetokenizerStatsMsg(counts[0] - entries, counts[1] - dropped))

    def _accept(self, msg: TokenizeMsg, to_backend: list[BackendMsg], to_frontend: list[FrontendMsg]) -> None:
        try:
            ids = self._tokenize.tokenize(msg)
        except Exception as e:
            reply = UserReply(uid=msg.uid, finish_reason=FinishReason.ERROR, failure=_failure(msg.uid, e))
            to_frontend.append(reply)
        else:
            user = UserMsg(
                uid=msg.uid,
                input_ids=ids_to_bytes(ids),
                sampling_params=msg.sampling_params,
                child_index=msg.child_index,
                level=msg.level,
                system_tokens=self._tokenize.system_tokens(msg, ids),
            )
            to_backend.append(user)

    def _with_texts(self, view: EngineView) -> EngineView:
        """Return `view` with the text of the first tokens of each node."""
        heads = [ids_from_bytes(node.head).tolist() for node in view.nodes]
        texts = self._tokenize.tokenizer.decode_batch(heads, skip_special_tokens=False)
        nodes = [
            msgspec.structs.replace(node, head=b"", text=text) for node, text in zip(view.nodes, texts, strict=True)
        ]
        return msgspec.structs.replace(view, nodes=nodes)

    def _convert(self, msg: EncodeMsg | DecodeMsg) -> ConversionReply:
        try:
            if isinstance(msg, EncodeMsg):
                return ConversionReply(uid=msg.uid, input_ids=ids_to_bytes(self._tokenize.encode(msg)))
            return ConversionReply(uid=msg.uid, text=self._tokenize.decode(msg))
        except Exception as e:
            return ConversionReply(uid=msg.uid, failure=_failure(msg.uid, e))


def _failure(uid: int, e: Exception) -> Failure:
    """Return the failure to reply. A bug (ours, or a library's on odd input) fails only this request."""
    if isinstance(e, RequestError):
        return Failure.of(e)
    logger.error("could not tokenize request %d", uid, exc_info=e)
    return Failure(message=f"tokenizing failed: {e}")
