// The section in view is marked in the list of sections, and a link into closed details opens them.
const links = [...document.querySelectorAll("nav a")];
const headings = links.map((link) => document.getElementById(decodeURIComponent(link.hash.slice(1))));
const mark = () => {
  const isAtEnd = scrollY > 0 && innerHeight + scrollY > document.documentElement.scrollHeight - 2;
  const passed = headings.filter((heading) => isAtEnd || heading?.getBoundingClientRect().top < 120).length;
  links.forEach((link, i) => {
    const here = i === Math.max(0, passed - 1);
    if (here && !link.hasAttribute("aria-current")) link.parentElement.scrollTo({ left: link.offsetLeft - 40 });
    here ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
  });
};
addEventListener("scroll", mark, { passive: true });
const open = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let e = target; e; e = e.parentElement) if (e.tagName === "DETAILS") e.open = true;
  target?.scrollIntoView();
};
addEventListener("hashchange", open);
open();
mark();
