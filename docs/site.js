// What the theme makes, for those who go by keyboard or hear the page: a button above each block of code, and a part of the
// table of contents, are no navigation of their own; a table that is wider than the page can be reached and scrolled.
function mend() {
  for (const nav of document.querySelectorAll(".md-code__nav, .md-nav--secondary .md-nav")) {
    nav.setAttribute("role", "none");
    nav.removeAttribute("aria-label");
  }
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap, .output")) {
    if (wrap.scrollWidth > wrap.clientWidth) wrap.tabIndex = 0;
    else wrap.removeAttribute("tabindex");
  }
}
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", mend);
mend();
