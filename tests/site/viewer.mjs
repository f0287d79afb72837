// Open one sample of a log in Inspect's viewer, as a reader would, and print what the page says as JSON:
// node viewer.mjs ORIGIN CHROMIUM MODULES SHOT LOG SAMPLE EPOCH
import { createRequire } from "node:module";
const [origin, chromium, modules, shot, log, sample, epoch] = process.argv.slice(2);
const { default: puppeteer } = await import(createRequire(modules + "/").resolve("puppeteer-core"));
const browser = await puppeteer.launch({ executablePath: chromium, args: ["--no-sandbox", "--disable-dev-shm-usage"], protocolTimeout: 240000 });
const tab = await browser.newPage(), errors = [];
tab.on("pageerror", (e) => errors.push(String(e.message || e)));
tab.on("dialog", async (d) => { errors.push(`dialog: ${d.message()}`); await d.dismiss(); });
await tab.setViewport({ width: 1360, height: 1800 });
await tab.goto(`${origin}/#/tasks/${encodeURIComponent(log)}/samples`, { waitUntil: "load", timeout: 120000 });
const link = `a[href*="/sample/${encodeURIComponent(sample)}/${epoch}/"]`;
await tab.waitForSelector(link, { timeout: 60000 });
await tab.evaluate((link) => document.querySelector(link).click(), link);
await tab.waitForFunction((title) => document.body.innerText.includes(title) && document.body.innerText.includes("ASSISTANT"), { timeout: 60000 }, `Sample ${sample} (Epoch ${epoch})`);
await new Promise((done) => setTimeout(done, 500));
await tab.screenshot({ path: shot });
console.log(JSON.stringify({ errors, text: await tab.evaluate(() => document.body.innerText), scripts: await tab.evaluate(() => [...document.scripts].map((s) => s.textContent).join("\n")) }));
await browser.close();
