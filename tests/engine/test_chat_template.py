"""Rendered chats equal transformers', refusals reach the client, and templates stay in their sandbox."""

import re
from datetime import datetime
from functools import cache

import pytest
from tiny_tokenizers import as_tokenizer, byte_level_vocabulary

from configs.errors import CheckpointError, InvalidRequest
from engine.checkpoints import open_checkpoint
from engine.text.chat_template import ChatTemplate
from engine.text.gguf_vocab import build_tokenizer
from engine.text.template_sandbox import MAX_STEPS
from engine.text.tokenizer import load_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = (
    "{{- bos_token }}\n{%- for message in messages %}\n"
    "    {%- if message.role not in ['user', 'assistant', 'system', 'tool'] %}\n"
    "        {{- raise_exception('Only user and assistant roles, not ' ~ message.role) }}\n    {%- endif %}\n"
    "    {{- '[' + message.role + '] ' }}\n"
    "    {%- if message.content is string %}{{ message.content | trim }}\n"
    "    {%- else %}{%- for part in message.content %}{{ part.text }}{%- endfor %}{%- endif %}\n"
    "    {{- eos_token }}\n{%- endfor %}\n{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
WITH_TOOLS = (
    "{% if tools %}Tools: {{ tools | tojson(indent=2) }}\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'skip' %}{% continue %}{% endif %}"
    "{% generation %}{% set words = message.content %}{{ words }}{% endgeneration %};"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{% endfor %}{{ mood }}"
)
TEMPLATES = {"chatml": CHATML, "with_bos": WITH_BOS, "with_tools": WITH_TOOLS}

HELLO = [{"role": "user", "content": "Hello <b>&'\"</b> déjà 😀"}]
LONG = [
    {"role": "system", "content": "Be kind.\n"},
    {"role": "user", "content": "  a<|end|>b  "},
    {"role": "assistant", "content": "Yes.", "tool_calls": None},
    {"role": "user", "content": "Go on"},
]
TOOLS = [{"type": "function", "function": {"name": "wéather", "parameters": {"type": "object"}}}]

TOKENIZER = as_tokenizer(byte_level_vocabulary(add_bos_token=True))


@cache
def transformers_tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(byte_level_vocabulary(add_bos_token=True)),
        bos_token="<|start|>",
        eos_token="<|end|>",
    )


def template(source, **special_tokens):
    return ChatTemplate(source, special_tokens or TOKENIZER.special_tokens)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [HELLO, LONG], ids=["hello", "long"])
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "tools": TOOLS, "mood": "cheerful"},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
    ids=["prompt", "tools", "continue"],
)
def test_ids_equal_transformers(name, messages, options):
    text = template(TEMPLATES[name]).render(messages, **options)
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    oracle = transformers_tokenizer()
    plain = {"chat_template": TEMPLATES[name], "return_dict": False, **options}
    assert text == oracle.apply_chat_template(messages, tokenize=False, **plain)
    assert ids == oracle.apply_chat_template(messages, tokenize=True, **plain)
    assert ids.count(TOKENIZER.bos_token_id) == (name == "with_bos")


def test_smollm2_equals_transformers(smollm2_path):
    tokenizer = load_tokenizer(open_checkpoint(smollm2_path))
    chat = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    oracle = transformers_tokenizer()
    for messages in (HELLO, LONG):
        expected = oracle.apply_chat_template(
            messages, chat_template=tokenizer.chat_template, tokenize=False, add_generation_prompt=True
        )
        assert chat.render(messages) == expected


def test_no_template_says_so():
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate(None, {}).render(HELLO)


def test_malformed_template_is_refused_at_start():
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate("{{ a }}\n{% for %}", {})


def test_the_templates_own_words_reach_the_client():
    with pytest.raises(InvalidRequest) as refused:
        template(WITH_BOS).render([{"role": "wizard", "content": "x"}])
    assert refused.value.message == "Only user and assistant roles, not wizard"
    assert refused.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages[9].content.x }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"])
def test_other_failures_are_the_requests_too(source):
    with pytest.raises(InvalidRequest, match="chat template failed") as refused:
        template(source).render(HELLO)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['os'] }}",
        "{{ messages.append(1) }}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_unsafe_templates_are_stopped(source):
    with pytest.raises(InvalidRequest, match="chat template"):
        template(source).render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(900) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_endless_templates_are_stopped(source):
    with pytest.raises(InvalidRequest, match="chat template"):
        template(source).render(HELLO)


def test_long_conversations_fit_the_step_limit():
    messages = HELLO * 20_000
    assert len(messages) < MAX_STEPS
    assert template(CHATML).render(messages).count("<|im_end|>") == 20_000


PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]


def test_text_parts_are_joined_for_templates_that_know_no_parts():
    assert "user\none\ntwo<|im_end|>" in template(CHATML).render(PARTS)


def test_text_parts_reach_templates_that_know_them():
    expected = transformers_tokenizer().apply_chat_template(
        PARTS, chat_template=WITH_BOS, tokenize=False, add_generation_prompt=True
    )
    assert template(WITH_BOS).render(PARTS) == expected
    assert "onetwo" in expected


def test_text_parts_survive_templates_that_would_drop_them():
    source = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}"
    assert template(source).render(PARTS) == "one\ntwo"


def test_parts_that_are_not_text_are_refused():
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(InvalidRequest, match="image_url"):
        template(CHATML).render(image)


def test_the_final_message_is_continued():
    messages = [*HELLO, {"role": "assistant", "content": "Once upon a"}]
    text = template(CHATML).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon a")
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "Once"}]}]
    for source in (CHATML, WITH_BOS):
        text = template(source).render(parts, add_generation_prompt=False, continue_final_message=True)
        assert text.endswith("Once")


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        (HELLO, {"add_generation_prompt": True}, "exclude each other"),
        ([], {}, "needs a message"),
        ([{"role": "assistant"}], {}, "needs text"),
        ([{"role": "dropped", "content": "x"}], {}, "leaves the final message out"),
    ],
)
def test_continuing_needs_a_final_text(messages, options, words):
    source = "{% for m in messages if m.role != 'dropped' %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidRequest, match=words):
        template(source).render(messages, continue_final_message=True, **{"add_generation_prompt": False, **options})


def test_messages_are_left_as_they_are():
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "x"}], "name": None}]
    template(CHATML).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == [{"role": "assistant", "content": [{"type": "text", "text": "x"}], "name": None}]


def test_the_date_is_todays():
    text = template("{{ strftime_now('%Y') }}").render(HELLO)
    assert re.fullmatch(r"\d{4}", text)
    assert int(text) in (datetime.now().year, datetime.now().year - 1)


def test_lone_surrogates_in_messages_can_be_encoded():
    text = template(CHATML).render([{"role": "user", "content": "a\ud800b"}])
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False), skip_special_tokens=False).count("\ufffd")
