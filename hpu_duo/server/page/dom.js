// Elements of the page. Text only ever becomes a text node, so nothing that a model or a user writes is markup.

/** The element of the page with this id. */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`expected an element #${id} on the page, found none`);
  return found;
}

/**
 * A new element.
 * @param {string} tag
 * @param {Object<string, string>} attributes
 * @param {...(Node|string)} children strings become text nodes
 */
export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A button with a function. */
export function makeButton(text, onClick, attributes = {}) {
  const button = make("button", { type: "button", ...attributes }, text);
  button.addEventListener("click", onClick);
  return button;
}

/** Write a text where another one stands, if it differs, so that screen readers hear of changes only. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
