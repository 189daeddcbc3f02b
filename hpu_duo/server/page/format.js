// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB"];

/** 12345 as 12,345. */
export const count = (value) => whole.format(value);

/** A rate: tenths below 100. */
export const rate = (value) => (value < 99.95 ? tenths : whole).format(value);

/** 0.528 as 53 %. */
export const percent = (share) => `${whole.format(100 * share)} %`;

/** 0.0528 as 5.3 %. */
export const finePercent = (share) => `${tenths.format(100 * share)} %`;

/** Bytes in units of 1,024. */
export function bytes(value) {
  let unit = 0;
  for (; value >= 1024 && unit < UNITS.length - 1; unit += 1) value /= 1024;
  return `${(unit && value < 99.95 ? tenths : whole).format(value)} ${UNITS[unit]}`;
}

/** Milliseconds, as seconds from one on. */
export const duration = (ms) => (ms < 999.5 ? `${whole.format(ms)} ms` : `${tenths.format(ms / 1000)} s`);

/** One thing, or several. */
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
