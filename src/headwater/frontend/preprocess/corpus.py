"""Texts on which two tokenizers are compared before the faster one is trusted."""

_TEXTS = (
    "",
    " ",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog. It's 12:45, isn't it? We'll see; they'd've gone, I'M SURE.",
    "   leading,  double   and trailing spaces   ",
    "\n\n\nlines\r\nof\ttext\n\n  indented\n\t\ttabs\n \n",
    "word" * 40,
    "a" * 300,
    "=" * 100 + "-" * 77 + "#" * 33,
    " " * 130 + "x" + "\n" * 40,
    "0 1 12 123 1234 12345 1234567890 3.14159 1e-9 0xFF 1,000,000 ½ ² ① Ⅷ ٣",
    "a  1   22\n\n3 \t4  b 5\n 6's 7'll  \n8 !9  ! 0  ",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n\nclass A(B):\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] ^= (b->c << 3) | ~d & 0x7f; } /* end */",
    '{"key": [1, 2.5, null, true], "nested": {"a b": "c\\n\\"d\\""}}',
    '<html><body class="x">&amp;&lt;</body></html> https://example.org/a/b?c=d&e=f#g user@example.org',
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n# Title\n\n* item\n  1. sub **bold** `code`\n",
    "Größe Übermut naïve façade Æsir øre ñandú ça œuvre ß ẞ İstanbul ıssız",
    "Привет, мир! Съешь ещё этих мягких французских булок.",
    "Γειά σου Κόσμε ἀρχὴ",
    "你好，世界！今天天气怎么样？我们去吃饭吧。「引号」——破折号…",
    "こんにちは世界。カタカナとひらがな、漢字。ﾊﾝｶｸ",
    "안녕하세요 세계! 한국어 텍스트입니다. ㅋㅋㅋ",
    "مرحبا بالعالم، كيف حالك؟ العَرَبِيَّة",
    "שלום עולם נִקּוּד",
    "नमस्ते दुनिया क्षत्रिय",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "Xin chào thế giới, tiếng Việt có dấu",
    "🙂 🎉🎊 👩‍👩‍👧‍👦 👍🏽 🇩🇪🇫🇷 ❤️ 🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "e\u0301 vs é, A\u030a vs Å, \u1100\u1161\u11a8 vs 각, q\u0307\u0323",
    "zero\u200bwidth non\u00a0breaking thin\u2009space soft\u00adhyphen \u202eRTL\u202c \ufeffbom",
    "control \x01\x02\x07\x1b[31mred\x1b[0m \x7f end",
    "𝕞𝕒𝕥𝕙 𝒔𝒄𝒓𝒊𝒑𝒕 ∑∫√∞≠≤ ∀x∈ℝ: x²≥0 → ⊢ ⟨a|b⟩ €£¥₿",
    "ALLCAPS camelCaseWords snake_case_words kebab-case-words PascalCase HTTPServer2Go",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<s>[INST] hi [/INST]</s> <|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
    "<bos><start_of_turn>user\nhi<end_of_turn> <|endoftext|> <unk> <pad> [CLS] [SEP] <tool_call>{}</tool_call>",
    " <|im_end|> spaced <|im_end|>\n<|im_end|><|im_end|>",
    "\u2581already marked\u2581words \u0120odd \u010aletters",
    "supercalifragilisticexpialidocious antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
)


def self_check_corpus() -> tuple[str, ...]:
    """Prose, code, numbers, scripts, emoji, white space, control characters and written-out special tokens."""
    return (*_TEXTS, "\n".join(_TEXTS))
