// Walk a served site in headless Chromium and print what was found as JSON: node walk.mjs ORIGIN CHROMIUM MODULES SHOTS PAGE...
import { createRequire } from "node:module";
import fs from "node:fs";
const [origin, chromium, modules, shots, ...pages] = process.argv.slice(2);
const require = createRequire(modules + "/");
const { default: puppeteer } = await import(require.resolve("puppeteer-core"));
const axe = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const WIDE = { width: 1360, height: 900 }, PHONE = { width: 390, height: 844 };
const SHOTS = new Set(process.env.SHOTS?.split(" ") ?? ["index.html", "level.html", "smarthome.html", "scores.html", "analysis/granularity.html"]);
const RULES = ["color-contrast", "heading-order", "page-has-heading-one", "empty-heading", "image-alt", "svg-img-alt", "link-name", "button-name", "label", "html-has-lang", "document-title"];

const browser = await puppeteer.launch({ executablePath: chromium, args: ["--no-sandbox", "--disable-dev-shm-usage"], protocolTimeout: 240000 });
const tab = await browser.newPage();
let errors = [];
tab.on("console", (m) => { if (["error", "warn"].includes(m.type())) errors.push(m.text()); });
tab.on("pageerror", (e) => errors.push(String(e.message || e)));
tab.on("requestfailed", (r) => errors.push(`${r.url()} ${r.failure()?.errorText}`));
tab.on("response", (r) => { if (r.status() >= 400) errors.push(`${r.status()} ${r.url()}`); });

const pause = (ms) => new Promise((done) => setTimeout(done, ms));
let mode = "light";
async function settled() {                                         // the theme sets its colours a moment after load or change
  await tab.waitForFunction((dark) => document.documentElement.classList.contains("quarto-dark") === dark, { timeout: 10000 }, mode === "dark").catch(() => {});
  await pause(50);
}
async function scheme(wanted) {
  mode = wanted;
  await tab.emulateMediaFeatures([{ name: "prefers-color-scheme", value: mode }]);
  await settled();
}
async function open(page, view) {
  await tab.setViewport(view);
  await tab.goto(`${origin}/${page}`, { waitUntil: "load", timeout: 120000 });
  await settled();
}
async function contrast(rules) {
  await tab.evaluate(axe);
  return tab.evaluate(async (rules) => {
    const { violations } = await axe.run(document, { runOnly: rules, resultTypes: ["violations"] });
    return violations.map((v) => ({ rule: v.id, count: v.nodes.length, nodes: v.nodes.slice(0, 3).map((n) => `${n.target.join(" ")}: ${n.any[0]?.message || n.html}`.slice(0, 260)) }));
  }, rules);
}
async function shot(page, name) {
  if (SHOTS.has(page)) await tab.screenshot({ path: `${shots}/${page.replace(/\W/g, "-").replace(/-html$/, "")}-${name}.png`, clip: { x: 0, y: 0, width: tab.viewport().width, height: 2600 }, captureBeyondViewport: true });
}
const look = () => tab.evaluate(() => {
  const main = document.querySelector("main"), text = main.innerText, out = [];
  for (const [what, pattern] of [["directive", /^\s*#\|.*$/m], ["fence", /^\s*:{3,}.*$/m], ["shortcode", /\{\{<.*?>\}\}/], ["raw block", /\{=html\}/], ["show_doc", /^show_doc\(.*$/m], ["div attributes", /^\{[.#][\w-]+.*\}$/m]]) {
    const found = text.match(pattern);
    if (found) out.push(`${what}: ${found[0].slice(0, 80)}`);
  }
  return {
    title: document.title, raw: out, ids: [...document.querySelectorAll("[id]")].map((e) => e.id),
    links: [...new Set([...document.querySelectorAll("a[href]")].map((a) => a.href))], sizes: text.length,
    unloaded: [...document.images].filter((i) => !i.complete || !i.naturalWidth).map((i) => i.src.slice(0, 120)),
    noalt: [...document.images].filter((i) => !(i.getAttribute("alt") || "").trim()).length,
  };
});
const overflow = () => tab.evaluate(() => {
  const wide = document.documentElement.scrollWidth - window.innerWidth;
  if (wide <= 1) return [];
  const culprits = [...document.querySelectorAll("main *")].filter((e) => e.getBoundingClientRect().right > window.innerWidth + 1 && !e.closest("pre, .scroll")).slice(0, 3);
  return [`${wide}px wider than the phone`, ...culprits.map((e) => `${e.tagName} ${e.className} ${e.textContent.slice(0, 60)}`)];
});

const report = {};
for (const page of pages) {
  errors = [];
  await tab.emulateMediaFeatures([{ name: "prefers-color-scheme", value: mode = "light" }]);
  await open(page, WIDE);
  const found = await look();
  found.axe = await contrast(RULES);
  await shot(page, "wide-light");
  await scheme("dark");
  found.dark = await tab.evaluate(() => getComputedStyle(document.body).backgroundColor);
  found.axeDark = await contrast(["color-contrast"]);
  await shot(page, "wide-dark");
  await scheme("light");
  await tab.setViewport(PHONE);
  await pause(500);                                                // the sidebar slides away
  found.overflow = await overflow();
  await shot(page, "phone-light");
  report[page] = { ...found, errors };
}
errors = [];
await open(pages[0], WIDE);
await tab.keyboard.press("/");
await tab.keyboard.type("ArgAcc", { delay: 30 });
await tab.waitForSelector(".search-result", { timeout: 20000 }).catch(() => {});     // none found: the test says so
report.search = { errors, axe: await contrast(["color-contrast"]), hits: await tab.$$eval(".search-result", (all) => all.map((a) => `${a.getAttribute("href")} ${a.innerText}`)) };
await tab.screenshot({ path: `${shots}/search.png` });
await browser.close();
console.log(JSON.stringify(report));
