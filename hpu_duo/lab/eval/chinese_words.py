"""Words of Chinese texts, cut with jieba's dictionary (extra ``longbench``)."""

from __future__ import annotations

from hpu_duo.extras import install_command


def cut_words(text: str) -> list[str]:
    """Words of a text in order, spaces and punctuation among them; their concatenation is the text.

    Raises:
        ValueError: the package jieba is not there.
    """
    try:
        import jieba
    except ModuleNotFoundError as error:
        raise ValueError(
            f"expected the package jieba for Chinese words ({install_command('longbench')}), got: {error}"
        ) from None
    # It tells on stderr that it reads its dictionary.
    jieba.setLogLevel("WARNING")
    return list(jieba.cut(text, cut_all=False))
