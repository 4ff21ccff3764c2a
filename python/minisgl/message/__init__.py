"""What the processes say to each other: typed msgpack, a closed table of types, no torch and no pickle.

    API server --TokenizerMsg--> tokenizer --BackendMsg--> scheduler --DetokenizeMsg--> detokenizer --FrontendMsg--> API

A frame on the wire is a *list* of messages of one channel (`codec`), so every message has its batch form.
A request and its abort take the same path, so an abort can never overtake its request.
"""

from minisgl.message.backend import AbortBackendMsg, BackendMsg, ExitMsg, FlushCacheMsg, UserMsg, ViewMsg
from minisgl.message.codec import Codec, ids_from_bytes, ids_to_bytes
from minisgl.message.failure import Failure
from minisgl.message.frontend import (
    ConversionReply,
    DetokenizerStatsMsg,
    FrontendMsg,
    StatsMsg,
    TokenLogprob,
    UserReply,
)
from minisgl.message.tokenizer import (
    AbortMsg,
    DecodeMsg,
    DetokenizeMsg,
    EncodeMsg,
    Finished,
    Started,
    TokenizeMsg,
    TokenizerMsg,
    TokenScores,
)
from minisgl.message.view import EngineView, NodeView, RequestView

__all__ = [
    "AbortBackendMsg",
    "AbortMsg",
    "BackendMsg",
    "Codec",
    "ConversionReply",
    "DecodeMsg",
    "DetokenizeMsg",
    "DetokenizerStatsMsg",
    "EncodeMsg",
    "EngineView",
    "ExitMsg",
    "Failure",
    "Finished",
    "FlushCacheMsg",
    "FrontendMsg",
    "NodeView",
    "RequestView",
    "Started",
    "StatsMsg",
    "TokenScores",
    "TokenizeMsg",
    "TokenLogprob",
    "TokenizerMsg",
    "UserMsg",
    "UserReply",
    "ViewMsg",
    "ids_from_bytes",
    "ids_to_bytes",
]
