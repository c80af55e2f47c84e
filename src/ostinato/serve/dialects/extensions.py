"""Fields that other servers added to the APIs. Clients send them in every dialect, mostly with values that change nothing."""

from __future__ import annotations

from typing import Annotated, Any

from ostinato.serve.dialects.field_rules import Cached, Fields, Ignored, Only

_DRAWN = "is not supported: tokens are drawn by temperature and top_p"
_FORM = "is not supported: ask for a format with the dialect's own field (response_format, text.format, output_config.format)"
_TEMPLATE = "is not supported: prompts are rendered by the model's own chat template"
_STOPS = "is not supported: end answers with stop strings"
_Decided = Annotated[Any, Ignored("the model decides by itself how long to think and to write")]


class Extensions(Fields):
    """The known extension fields, common to all requests that sample."""

    top_k: Annotated[Any, Only(-1, 0, why=_DRAWN)] = None
    min_p: Annotated[Any, Only(0, why=_DRAWN)] = None
    top_a: Annotated[Any, Only(0, why=_DRAWN)] = None
    typical_p: Annotated[Any, Only(1, why=_DRAWN)] = None
    tfs_z: Annotated[Any, Only(1, why=_DRAWN)] = None
    mirostat: Annotated[Any, Only(0, why=_DRAWN)] = None
    repetition_penalty: Annotated[
        Any, Only(1, why="is not supported: send presence_penalty or frequency_penalty (chat completions)")
    ] = None
    no_repeat_ngram_size: Annotated[Any, Only(0, why=_DRAWN)] = None
    use_beam_search: Annotated[Any, Only(False, why=_DRAWN)] = None
    best_of: Annotated[Any, Only(1, why="is not supported: ask for n answers and choose")] = None
    length_penalty: Annotated[Any, Only(1, why=_DRAWN)] = None
    early_stopping: Annotated[Any, Only(False, why=_DRAWN)] = None
    min_tokens: Annotated[Any, Only(0, why="is not supported: the model decides when it has said enough")] = None
    ignore_eos: Annotated[Any, Only(False, why="is not supported: the model decides when it has said enough")] = None
    stop_token_ids: Annotated[Any, Only([], why=_STOPS)] = None
    bad_words: Annotated[Any, Only([], why="is not supported: forbid tokens with logit_bias (chat completions)")] = None
    include_stop_str_in_output: Annotated[Any, Only(False, why=_STOPS)] = None
    skip_special_tokens: Annotated[Any, Only(True)] = None
    spaces_between_special_tokens: Annotated[Any, Only(True)] = None
    detokenize: Annotated[Any, Only(True)] = None
    truncate_prompt_tokens: Annotated[Any, Only(-1, why="is not supported: shorten the prompt yourself")] = None
    prompt_logprobs: Annotated[Any, Only()] = None
    return_token_ids: Annotated[Any, Only(False)] = None
    return_tokens_as_token_ids: Annotated[Any, Only(False)] = None
    echo: Annotated[Any, Only(False)] = None
    allowed_token_ids: Annotated[Any, Only()] = None
    logits_processors: Annotated[Any, Only([])] = None
    guided_json: Annotated[Any, Only(why=_FORM)] = None
    guided_regex: Annotated[Any, Only(why=_FORM)] = None
    guided_choice: Annotated[Any, Only(why=_FORM)] = None
    guided_grammar: Annotated[Any, Only(why=_FORM)] = None
    structured_outputs: Annotated[Any, Only(why=_FORM)] = None
    chat_template: Annotated[Any, Only(why=_TEMPLATE)] = None
    chat_template_kwargs: Annotated[Any, Only({}, why=_TEMPLATE)] = None
    documents: Annotated[Any, Only([], why="is not supported: put their text into a message")] = None
    priority: Annotated[Any, Only(0, why="is not supported: the operator decides who waits")] = None
    request_id: Annotated[Any, Ignored("answers have ids of the server's")] = None
    cache_prompt: Cached = None
    keep_alive: Annotated[Any, Ignored("the model stays loaded")] = None
    reasoning_effort: _Decided = None
    verbosity: _Decided = None
    enable_thinking: Annotated[Any, Only(why=_TEMPLATE)] = None
