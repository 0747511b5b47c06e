// Order of the search results: the guide, then the API reference, then the pages of the caption
// "Background" in index.md. Results of one group keep the order of Sphinx's own scores.
const BACKGROUND = ["design", "compatibility", "measurements", "differences"];

const pageGroup = (page) => (BACKGROUND.includes(page) ? 0 : page.startsWith("api/") ? 1 : 2);

var Scorer = {
  score: ([page, , , , score]) => 1000 * pageGroup(page) + score,

  // Sphinx's defaults.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
